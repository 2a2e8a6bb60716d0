"""Running a sweep: backends (Ray Tune or this process), the coordinator, and accounting as each trial ends.

Other rooms import from its modules: an export here would make `environment`, which must be imported before Ray, load
Ray.
"""
