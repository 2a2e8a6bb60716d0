"""What is kept: the files of a sweep, the states and results of its trials, and who may write them.

Other rooms import from its modules: an export here would make `layout` and `states` load torch, as `results` does.
"""
