"""Imports what tests import, in the server from which their processes are forked: that takes longer than most tests."""

import dp_accounting.pld
import hypothesis
import mpmath
import scipy.stats
import sklearn.datasets
import torchvision

import orchestration.commands.main
import orchestration.library
import orchestration.pipeline
import orchestration.report.page

__all__ = ["dp_accounting", "hypothesis", "mpmath", "orchestration", "scipy", "sklearn", "torchvision"]
