"""Optimizers by name (`table.py`), parameters with weight decay (`decay.py`), and loopwright's own two."""

from .adafactor import Adafactor
from .decay import decay_parameter_names, parameter_groups
from .muon import Muon
from .options import OptimizerSpec, parse_optim_args
from .table import OPTIMIZERS, OptimizerRow, build_optimizer, optimizer_class_and_kwargs, register_optimizer

__all__ = [
    "OPTIMIZERS",
    "Adafactor",
    "Muon",
    "OptimizerSpec",
    "OptimizerRow",
    "build_optimizer",
    "decay_parameter_names",
    "optimizer_class_and_kwargs",
    "parameter_groups",
    "parse_optim_args",
    "register_optimizer",
]
