"""What to say of results whose noise can be computed from known seeds."""

from __future__ import annotations

from collections.abc import Iterable

from orchestration.records.published import PublishedTrial


def research_warning(trials: Iterable[PublishedTrial]) -> tuple[str, ...]:
    """A sentence if the noise of some private trial is drawn from its seed, which results show; else nothing."""
    if not any(trial.tags.get("research_mode") == "True" for trial in trials if not trial.is_baseline):
        return ()
    return (
        "Research mode: the noise is drawn from the seeds of the trials, which results show. Whoever knows them can "
        "subtract it, so every ε says what the same runs would cost with secret noise; for models that are released, "
        "set noise_source: os_entropy.",
    )
