"""What results mean: metrics, settings averaged over seeds, and the joined record of a sweep. Pure.

Other rooms import from its modules: an export here would make `formats` and `metrics` load torch, as `record` does.
"""
