"""Sweep files: their schema, the grid of trials that they ask for, and the plan of each trial.

Other packages import only the modules in `__all__`; of these, `components`, `draft`, `picture_column`,
`plan` and `text_column` load torch.
"""

__all__ = [
    "components",
    "draft",
    "grid",
    "identity",
    "manifest",
    "people",
    "picture_column",
    "plan",
    "planned",
    "python_objects",
    "schema",
    "sections",
    "text",
    "text_column",
    "tune",
    "tuning_stages",
    "user_code",
]
