"""What is asked: the sweep file, its grid of trials, and the plan of each.

Other rooms import from its modules: an export here would make `text` and `schema` load torch, as `plan` does.
"""
