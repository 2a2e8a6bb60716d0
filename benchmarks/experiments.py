"""Every sweep of sweeps/papers, and the printed numbers that it reproduces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.printed import (
    DECAYS,
    FACTORS,
    INITIAL,
    INITIAL_AT_ONE_DECAY,
    LASTING,
    LAYERS,
    LAYERS_IN_TRAINING,
    LINEAR,
    UNITS,
    Experiment,
    Item,
    adult,
    attacked,
    bounds,
    cancer,
    hinge,
    individual,
    levels_of_validation,
    longer_epochs,
    losses,
    mnist,
    naive_on_mnist,
    noises,
    of_clipping,
    paper_d,
    released,
    runs,
    same_epochs,
    search,
    table_ii,
    thresholds,
)

EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "a-mnist": Experiment(
        "Paper A on MNIST: Figures 1 and 4 to 8, Tables 2 and 3, Appendix D",
        (
            *individual(),
            *released(),
            *of_clipping(".9726", ".9717"),
            *attacked(),
        ),
    ),
    "a-mnist-cnn": Experiment(
        "Paper A on MNIST with a convolutional network: Figures 1 and 4 to 8, Table 3",
        (*individual(), *of_clipping(".9726", ".9717")),
    ),
    "a-mnist-hinge": Experiment("Paper A, Appendix F on MNIST: the hinge loss", tuple(hinge())),
    "a-thresholds": Experiment(
        "Paper A, Appendices C and E: bounds, as multiples of the median norm", tuple(thresholds())
    ),
    "a-cifar": Experiment("Paper A on CIFAR-10: Figures 1, 2, 4, 5 and 12, Table 3"),
    "a-utkface": Experiment("Paper A on UTKFace: gender and age by race"),
    "a-cifar-small": Experiment(
        "Paper A on CIFAR-10, Figure 14: the two-layer network of Papernot et al., 30 epochs",
        (
            Item("mean epsilon_i", "flat · constant", "mean_example_epsilon", "", "plain"),
            Item("mean epsilon_i of cats", "flat · constant", "epsilon_of.cat", "7.7", "plain"),
            Item("share of examples within 1 % of the worst case", "flat · constant", "share_at_worst_case"),
            Item("r of estimates at 1 refresh per epoch", "flat · constant", "refreshes_1.correlation", "", "plain"),
            Item("test accuracy", "flat · constant", "accuracy"),
        ),
    ),
    "c-table2": Experiment(
        "Paper C, Table II on MNIST, schedules",
        (
            *table_ii("per_layer · time", "Time", "38", ".934", ".931"),
            *table_ii("per_layer · step", "Step", "31", ".928", ".929"),
            *table_ii("per_layer · exponential", "Exponential", "71", ".934", ".929"),
            *table_ii("per_layer · polynomial", "Polynomial", "44", ".930", ".932"),
        ),
    ),
    "c-table2-uniform": Experiment(
        "Paper C, Table II on MNIST, uniform", table_ii("per_layer · constant", "Uniform", "100", ".918", ".919")
    ),
    "c-table2-same-epochs": Experiment(
        "Paper C, Table II on MNIST, without privacy and uniform for as many epochs", tuple(same_epochs())
    ),
    "c-table2-longer": Experiment(
        "Paper C, Table II on MNIST, without privacy and uniform for 64 and 100 epochs", tuple(longer_epochs())
    ),
    "c-table2-validation": Experiment(
        "Paper C, Table II and Figure 4 on MNIST, validation",
        (*table_ii("per_layer · validation", "Validation", "64", ".930", ".930"), *levels_of_validation()),
    ),
    "c-table2-layers": Experiment(
        "Paper C, Table II on MNIST, with noise 4 sigma on every layer and twice the rho",
        (
            Item("Uniform, test accuracy", "per_layer · constant · sigma 5.65685", "accuracy", ".919"),
            Item("Time, test accuracy", "per_layer · time · sigma 7.07107", "accuracy", ".931"),
        ),
    ),
    "c-cancer": cancer("Paper C, Figure 14 (Cancer), uniform", "constant", "500"),
    "c-cancer-exponential": cancer("Paper C, Figure 14 (Cancer), exponential", "exponential", ""),
    "c-cancer-validation": cancer("Paper C, Figure 14 (Cancer), validation", "validation", ""),
    "d-adult": adult("Paper D, Tables 1 and 2, Adult by sex, 80 % of the rows train"),
    "d-adult-uci": adult("The same on UCI's own split"),
    "d-dutch": paper_d(
        "Paper D, Tables 1 and 2, Dutch by sex",
        {"": ".7879", "male": ".8013", "female": ".7744"},
        {
            ("flat · constant", "DPSGD"): {"": "-.1001", "male": "-.1534", "female": "-.0466"},
            ("naive · constant", "Naive"): {"": "-.1004", "male": "-.1549", "female": "-.0458"},
            ("dpsgd_f · constant", "DPSGD-F"): {"": "-.0130", "male": "-.0160", "female": "-.0099"},
        },
        *losses("non-private", "SGD", {"male": ("0.52", "0.19"), "female": ("0.53", "0.19")}),
        *losses("flat · constant", "DPSGD", {"male": ("0.59", "0.26"), "female": ("0.53", "0.12")}),
        *losses("naive · constant", "Naive", {"male": ("0.59", "0.26"), "female": ("0.53", "0.12")}),
        *losses("dpsgd_f · constant", "DPSGD-F", {"male": ("0.51", "0.19"), "female": ("0.52", "0.18")}),
    ),
    "d-mnist": mnist("Paper D, Tables 1 and 2 on MNIST with 500 of class 8", *naive_on_mnist()),
    "d-mnist-short": mnist("The same with 20 epochs at three times the learning rate", *naive_on_mnist()),
    "d-table3": Experiment("Paper D, Table 3 on MNIST with 500 of class 8: clipping bounds of DPSGD", tuple(bounds())),
    "d-figure3": Experiment("Paper D, Figure 3(b) on MNIST with 500 of class 8: noise", tuple(noises())),
    "d-mnist-search": Experiment("What brings DPSGD-F to its printed change of accuracy on MNIST?", tuple(search())),
    "c-figure6": Experiment("Paper C, Figure 6 with Table III: training times", runs(LASTING)),
    "c-figure7": Experiment("Paper C, Figure 7: decay rates", runs(DECAYS)),
    "c-figure8": Experiment("Paper C, Figure 8: factors of the validation schedule", runs(FACTORS)),
    "c-figure9": Experiment("Paper C, Figure 9: learning rates", runs(LINEAR)),
    "c-figure10": Experiment("Paper C, Figure 10: hidden units", runs(UNITS)),
    "c-figure11": Experiment("Paper C, Figure 11(a): initial noise, 60 epochs", runs(INITIAL)),
    "c-figure11-decay": Experiment("Paper C, Figure 11(b): initial noise, decay 0.015", runs(INITIAL_AT_ONE_DECAY)),
    "c-table4": Experiment("Paper C, Table IV: hidden layers", runs(LAYERS, LAYERS_IN_TRAINING)),
    "scattering-mnist": Experiment(
        "Tramèr and Boneh (2021), Table 1: scattering features and a linear model on MNIST at ε = 3",
        (Item("test accuracy", "flat · constant", "accuracy", ".987"),),
    ),
    "scattering-fashion": Experiment(
        "Tramèr and Boneh (2021), Table 1: scattering features and a linear model on Fashion-MNIST at ε = 3",
        (Item("test accuracy", "flat · constant", "accuracy", ".897"),),
    ),
    "adult-payers": Experiment("Who pays for being served better?"),
    "mnist-payers": Experiment("Does a rare class pay for being served better?"),
    "adult-bounds": Experiment("How much of the gap is the bound?"),
    "adult-filter": Experiment("A filter against flat clipping at the same guarantee"),
    "adult-tuning": Experiment("Demelius et al. (2025) on Adult"),
    "batches-digits": Experiment("Random allocation and shuffled epochs against Poisson batches, on digits"),
    "batches-adult": Experiment("The same on Adult"),
    "batches-mnist": Experiment("The same on 3,000 pictures of MNIST"),
    "noise-mnist": Experiment("Correlated against independent noise, on 3,000 pictures of MNIST"),
    "noise-cifar": Experiment("The same on 3,000 pictures of CIFAR-10"),
}
"""Every sweep of sweeps/papers, in the order of the page."""

PLANNED_ONLY: Final[Mapping[str, str]] = {
    "a-cifar": "300 epochs of a WRN16-4 need a GPU, which was not at hand",
    "a-utkface": "the photographs are not at hand",
}
"""Sweeps that are planned and not trained here, and why."""
