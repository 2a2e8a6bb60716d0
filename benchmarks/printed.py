"""Numbers about trained models printed in the papers, each with the setting and the number that reproduce it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Form = Literal["share", "change", "plain"]


@dataclass(frozen=True)
class Item:
    """A printed number. setting, number: names in the stored sweep. printed: "" if the paper has only a plot."""

    item: str
    setting: str
    number: str
    printed: str = ""
    form: Form = "share"


@dataclass(frozen=True)
class Experiment:
    """A sweep of sweeps/papers and the printed numbers that it reproduces."""

    title: str
    items: tuple[Item, ...] = ()


def _by_group(setting: str, of: str, number: str, printed: Mapping[str, str], form: Form) -> Iterator[Item]:
    """Numbers of all test examples ("") and by group."""
    for group, value in printed.items():
        name = f"by_group.{group}.{number}" if group else number
        yield Item(f"{of}, {group or 'all'}", setting, name, value, form)


def paper_d(
    title: str, accuracies: Mapping[str, str], changes: Mapping[tuple[str, str], Mapping[str, str]], *more: Item
) -> Experiment:
    """Paper D, Table 1: accuracy without privacy by group, and changes by (setting, name in the paper)."""
    items = list(_by_group("non-private", "SGD", "accuracy", accuracies, "share"))
    for (setting, of), printed in changes.items():
        items += _by_group(setting, of, "accuracy_change", printed, "change")
    return Experiment(title, (*items, *more))


def losses(setting: str, of: str, printed: Mapping[str, tuple[str, str]]) -> Iterator[Item]:
    """Paper D, Table 2, by group: the average loss, and the average gradient norm in both ways to read the paper."""
    for group, (loss, norm) in printed.items():
        yield Item(f"Table 2: {of}, loss, {group}", setting, f"by_group.{group}.loss", loss, "plain")
        norms = (("mean gradient norm", "by_group.{}.gradient_norm"), ("norm of mean gradient", "mean_gradient.{}"))
        for reading, number in norms:
            yield Item(f"Table 2: {of}, {reading}, {group}", setting, number.format(group), norm, "plain")


def adult(title: str) -> Experiment:
    """Paper D, Tables 1 and 2, on Adult by sex."""
    return paper_d(
        title,
        {"": ".8099", "Male": ".7610", "Female": ".9117"},
        {
            ("flat · constant", "DPSGD"): {"": "-.0592", "Male": "-.0740", "Female": "-.0281"},
            ("naive · constant", "Naive"): {"": "-.0593", "Male": "-.0742", "Female": "-.0281"},
            ("dpsgd_f · constant", "DPSGD-F"): {"": "-.0254", "Male": "-.0298", "Female": "-.0161"},
        },
        *losses("non-private", "SGD", {"Male": ("0.48", "0.08"), "Female": ("0.27", "0.11")}),
        *losses("flat · constant", "DPSGD", {"Male": ("0.68", "0.41"), "Female": ("0.31", "0.12")}),
        *losses("naive · constant", "Naive", {"Male": ("0.71", "0.43"), "Female": ("0.32", "0.13")}),
        *losses("dpsgd_f · constant", "DPSGD-F", {"Male": ("0.50", "0.12"), "Female": ("0.27", "0.08")}),
    )


def table_ii(setting: str, of: str, epochs: str, training: str, testing: str) -> tuple[Item, ...]:
    """Return the items of one schedule of paper C, Table II."""
    return (
        Item(f"{of}, epochs", setting, "epochs", epochs, "plain"),
        Item(f"{of}, training accuracy", setting, "training_accuracy", training),
        Item(f"{of}, test accuracy", setting, "accuracy", testing),
    )


def cancer(title: str, schedule: str, epochs: str) -> Experiment:
    """Paper C, Figure 14: one schedule on the Cancer data set."""
    setting = f"flat · {schedule}"
    items = (
        Item(f"{schedule}, epochs of one full batch", setting, "steps", epochs, "plain"),
        Item(f"{schedule}, training accuracy", setting, "training_accuracy"),
        Item(f"{schedule}, test accuracy", setting, "accuracy"),
    )
    return Experiment(title, items)


_GROUPS_OF_MNIST: Final = ("", "2", "8")
_PRINTED_SGD: Final = dict(zip(_GROUPS_OF_MNIST, (".9855", ".9903", ".9292"), strict=True))
_PRINTED_F: Final = dict(zip(_GROUPS_OF_MNIST, ("-.0293", "-.0281", "-.0432"), strict=True))


def naive_on_mnist() -> Iterator[Item]:
    """Naive in paper D's Tables 1 and 2 on MNIST."""
    setting, changes = "naive · constant", dict(zip(_GROUPS_OF_MNIST, ("-.1500", "-.1512", "-.1510"), strict=True))
    yield from _by_group(setting, "Naive", "accuracy_change", changes, "change")
    yield from losses(setting, "Naive", {"2": ("3.08", "0.83"), "8": ("1.89", "0.76")})


def mnist(title: str, *more: Item) -> Experiment:
    """Paper D, Tables 1 and 2, on MNIST, for all examples and for classes 2 and 8."""
    return paper_d(
        title,
        _PRINTED_SGD,
        {
            ("flat · constant", "DPSGD"): dict(zip(_GROUPS_OF_MNIST, ("-.1081", "-.0707", "-.6807"), strict=True)),
            ("dpsgd_f · constant", "DPSGD-F"): _PRINTED_F,
        },
        *losses("non-private", "SGD", {"2": ("0.04", "0.68"), "8": ("0.04", "4.76")}),
        *losses("flat · constant", "DPSGD", {"2": ("0.41", "13.53"), "8": ("2.16", "100.46")}),
        *losses("dpsgd_f · constant", "DPSGD-F", {"2": ("0.20", "1.45"), "8": ("0.42", "2.53")}),
        *more,
    )


def search() -> Iterator[Item]:
    """DPSGD and DPSGD-F with every bound, noise of the counts and memory of the counts that was tried."""
    for bound, printed in (("1", ("-.1081", "-.6807")), ("2", ("-.0587", "-.3286")), ("5", ("-.0240", "-.1099"))):
        yield from _by_group(
            f"flat (bound {bound}) · constant",
            f"DPSGD, bound {bound}",
            "accuracy_change",
            dict(zip(("", "8"), printed, strict=True)),
            "change",
        )
    for bound in ("1", "2"):
        for noise in ("2", "10"):
            for memory in ("0", "0.95"):
                yield from _by_group(
                    f"dpsgd_f (bound {bound}, count noise multiplier {noise}, count memory {memory}) · constant",
                    f"DPSGD-F, bound {bound}, count noise {noise}, memory {memory}",
                    "accuracy_change",
                    {group: _PRINTED_F[group] for group in ("", "8")} if bound == "1" else {"": "none", "8": "none"},
                    "change",
                )


def bounds() -> Iterator[Item]:
    """Paper D, Table 3: DPSGD at each clipping bound, for all examples and for classes 2 and 8."""
    yield from _by_group("non-private", "SGD", "accuracy", _PRINTED_SGD, "share")
    for bound, printed in (
        ("1", ("-.1081", "-.0707", "-.6807")),
        ("2", ("-.0587", "-.0426", "-.3286")),
        ("3", ("-.0390", "-.0232", "-.2013")),
        ("4", ("-.0286", "-.0194", "-.1376")),
        ("5", ("-.0240", "-.0145", "-.1099")),
    ):
        changes = dict(zip(_GROUPS_OF_MNIST, printed, strict=True))
        yield from _by_group(f"flat (bound {bound}) · constant", f"C = {bound}", "accuracy_change", changes, "change")


def noises() -> Iterator[Item]:
    """Paper D, Figure 3(b): DPSGD and DPSGD-F at each noise multiplier, for classes 2 and 8."""
    for method, of in (("flat", "DPSGD"), ("dpsgd_f", "DPSGD-F")):
        for sigma in ("0.8", "1.6", "3.2", "6.4"):
            setting, name = f"{method} · constant · sigma {sigma}", f"{of}, σ {sigma}"
            yield Item(f"{name}, epsilon", setting, "epsilon", "", "plain")
            yield from _by_group(setting, name, "accuracy_change", dict.fromkeys(("2", "8"), ""), "change")


def individual() -> Iterator[Item]:
    """Paper A, Figures 1 and 4 to 8, and epsilons by privacy loss distributions."""
    rows: tuple[tuple[str, str, str, Form], ...] = (
        ("Figure 1: share of examples within 1 % of the worst case", "share_at_worst_case", "about .03", "share"),
        ("Figure 4: r of estimated and exact epsilon_i", "estimates.correlation", "> .99", "plain"),
        ("Figure 4: the same at 0.5 refreshes per epoch", "refreshes_0.5.correlation", "> .99", "plain"),
        ("Figure 4: the same at 1 refresh per epoch", "refreshes_1.correlation", "> .99", "plain"),
        ("Figure 4: the same at 3 refreshes per epoch", "refreshes_3.correlation", "> .99", "plain"),
        ("Figure 4: mean error of an estimate", "estimates.mean_error", "", "plain"),
        ("Figure 4: largest error of an estimate", "estimates.largest_error", "", "plain"),
        ("Figure 5: r of epsilon_i and log loss", "loss_correlation", "> .9", "plain"),
        ("Figure 6: r over the digits of accuracy and mean epsilon_i", "group_correlation", "", "plain"),
        ("By PLD: worst case", "worst_case_by_pld", "none", "plain"),
        ("By PLD: mean epsilon_i", "mean_example_epsilon_by_pld", "none", "plain"),
        ("By PLD: median epsilon_i", "median_example_epsilon_by_pld", "none", "plain"),
    )
    return (Item(of, "flat · constant", number, printed, form) for of, number, printed, form in rows)


def released() -> Iterator[Item]:
    """Paper A, Table 2: epsilon_i over all examples, and the error of their release."""
    for of, number, printed in (
        ("mean epsilon_i", "mean_example_epsilon", "0.686"),
        *(
            (f"quantile {rank} of epsilon_i", f"epsilon_quantile.{rank}", value)
            for rank, value in (("0.1", "0.236"), ("0.3", "0.318"), ("0.7", "0.697"), ("0.9", "1.682"))
        ),
        ("median epsilon_i", "median_example_epsilon", "0.431"),
    ):
        yield Item(f"Table 2: {of}", "flat · constant", number, printed, "plain")
    yield Item("Table 2: relative error of what is released", "flat · constant", "release_error", ".0113")


def of_clipping(flat: str, individual: str) -> tuple[Item, ...]:
    """Paper A, Table 3 and Figures 7 and 8: individual clipping."""
    return (
        Item(
            "Figure 7: r of epsilon_i and log loss, individual clipping",
            "individual · constant",
            "loss_correlation",
            "> .9",
            "plain",
        ),
        Item(
            "Figure 8: r over the digits, individual clipping",
            "individual · constant",
            "group_correlation",
            "",
            "plain",
        ),
        Item("Table 3: test accuracy, maximum clipping", "flat · constant", "accuracy", flat),
        Item("Table 3: test accuracy, individual clipping", "individual · constant", "accuracy", individual),
    )


def attacked() -> tuple[Item, ...]:
    """Paper A, Appendix D."""
    return (
        Item("Appendix D: membership inference", "flat · constant", "membership", "about .5"),
        Item("Appendix D: membership inference, without privacy", "non-private", "membership"),
    )


def thresholds() -> Iterator[Item]:
    """Paper A, Appendix C; the paper's numbers are for CIFAR-10."""
    shares = {"0.1": "about .70 (CIFAR-10)", "1.5": "about .02 (CIFAR-10)"}
    for multiple in ("0.1", "0.3", "0.5", "1", "1.5"):
        setting, of = f"flat (bound median multiple {multiple}) · constant", f"{multiple} M"
        share = shares.get(multiple, "")
        yield Item(f"{of}: test accuracy", setting, "accuracy")
        yield Item(f"{of}: share within 1 % of the worst case", setting, "share_at_worst_case", share)
        yield Item(f"{of}: mean epsilon_i", setting, "mean_example_epsilon", "", "plain")
        yield Item(f"{of}: r of epsilon_i and log loss", setting, "loss_correlation", "", "plain")


def runs(settings: Mapping[str, tuple[str, str]], training: Mapping[str, str] | None = None) -> tuple[Item, ...]:
    """Epochs and accuracies of settings of paper C, given as title: (name of the setting, printed test accuracy).

    training: printed training accuracies by title, where the paper has any.
    """
    return tuple(
        item
        for of, (setting, printed) in settings.items()
        for item in (
            Item(f"{of}: epochs", setting, "epochs", "", "plain"),
            Item(f"{of}: training accuracy", setting, "training_accuracy", (training or {}).get(of, "")),
            Item(f"{of}: test accuracy", setting, "accuracy", printed),
        )
    )


def same_epochs() -> Iterator[Item]:
    """Paper C, Table II, last two rows: non-private and uniform runs for as many epochs as each schedule lasts."""
    for schedule, epochs, sigma, plain, uniform in (
        ("Time", 38, "4.93154", (".959", ".957"), (".922", ".925")),
        ("Step", 31, "4.45422", (".955", ".954"), (".921", ".925")),
        ("Exponential", 71, "6.74092", (".971", ".965"), (".922", ".925")),
        ("Polynomial", 44, "5.3066", (".963", ".959"), (".925", ".929")),
    ):
        yield from _as_long_as(schedule, epochs, sigma, plain, uniform)


def longer_epochs() -> Iterator[Item]:
    """The same for the columns "Validation" and "Uniform", whose uniform noise is that of the column itself."""
    yield from _as_long_as("Validation", 64, "6.4", (".97", ".964"), (".924", ".926"))
    yield from _as_long_as("Uniform", 100, "8", (".978", ".970"), (".918", ".919"))


def _as_long_as(
    schedule: str, epochs: int, sigma: str, plain: tuple[str, str], uniform: tuple[str, str]
) -> Iterator[Item]:
    """Training and test accuracy of ``epochs`` epochs, as printed without privacy and with uniform noise."""
    for of, setting, printed in (
        ("without privacy", f"non-private · epochs {epochs}", plain),
        ("uniform", f"per_layer · constant · epochs {epochs} · sigma {sigma}", uniform),
    ):
        for number, value in zip(("training_accuracy", "accuracy"), printed, strict=True):
            what = "training" if number == "training_accuracy" else "test"
            yield Item(f"{epochs} epochs as {schedule}, {of}: {what} accuracy", setting, number, value)


def levels_of_validation() -> Iterator[Item]:
    """Paper C, Figure 4: how many epochs the validation schedule keeps each noise multiplier."""
    for sigma, epochs in (("10", "29"), ("7", "20"), ("4.9", "10")):
        yield Item(
            f"Figure 4: epochs at noise multiplier {sigma}",
            "per_layer · validation",
            f"epochs_at.{sigma}",
            epochs,
            "plain",
        )


def hinge() -> Iterator[Item]:
    """Paper A, Appendix F with Figure 13: the hinge loss; the paper's numbers are for CIFAR-10."""
    rows: tuple[tuple[str, str, str, Form], ...] = (
        ("r of estimates at 1 refresh per epoch", "refreshes_1.correlation", "> .99 (CIFAR-10)", "plain"),
        ("r over the digits of accuracy and mean epsilon_i", "group_correlation", "", "plain"),
        ("mean epsilon_i", "mean_example_epsilon", "", "plain"),
        ("test accuracy", "accuracy", "", "share"),
    )
    for of, number, printed, form in rows:
        yield Item(f"Hinge loss: {of}", "flat · constant", number, printed, form)


LINEAR: Final = {
    f"end {end:g}": (f"per_layer · exponential · learning rate schedule linear (end {10 * end:g})", "")
    for end in (0.01, 0.03, 0.05, 0.07)
}
DECAYS: Final = {
    f"decay {decay}": (f"per_layer · exponential (decay {decay})", "")
    for decay in ("0.005", "0.02", "0.05", "0.2", "0.5")
}
FACTORS: Final = {
    f"factor {factor}": (f"per_layer · validation (factor {factor})", "") for factor in ("0.3", "0.5", "0.7", "0.9")
}
UNITS: Final = {
    f"{units} units": (f"per_layer · exponential · model pca_mlp (hidden {units})", "")
    for units in (200, 400, 800, 1600)
}
INITIAL: Final = {
    f"initial noise {sigma}": (f"per_layer · exponential (decay {decay}) · sigma {sigma}", "")
    for sigma, decay in ((7, "0.0037"), (10, "0.0138"), (14, "0.0222"), (20, "0.0303"))
}
INITIAL_AT_ONE_DECAY: Final = {
    f"initial noise {sigma}": (f"per_layer · exponential · sigma {sigma}", "") for sigma in (7, 10, 14, 20)
}
LASTING: Final = {
    f"{name}, {epochs} epochs": (f"per_layer · {name} ({key} {value})", "")
    for name, key, values in (
        ("time", "decay", ("0.076", "0.019", "0.0048")),
        ("step", "factor", ("0.5459", "0.851", "0.956")),
        ("exponential", "decay", ("0.0442", "0.0138", "0.0041")),
        ("polynomial", "power", ("6.2077", "1.4317", "0.1626")),
    )
    for epochs, value in zip((30, 60, 100), values, strict=True)
}
LAYERS: Final = {
    f"{layers} hidden": (
        f"per_layer (bound {bound}) · exponential · model mlp (hidden [{', '.join(['1000'] * layers)}])",
        printed,
    )
    for layers, bound, printed in ((1, "5.656854", ".931"), (2, "6.928203", ".921"), (3, "8", ".898"))
}
LAYERS_IN_TRAINING: Final = {"1 hidden": ".9315", "2 hidden": ".9228", "3 hidden": ".902"}
