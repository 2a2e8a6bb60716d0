"""The self-contained HTML report of a sweep.

Other rooms import from its modules: an export here would make `owner`, for `dpsweep owner-report`, load plotly.
"""
