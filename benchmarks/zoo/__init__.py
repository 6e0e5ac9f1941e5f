"""Real models, built from a config with random weights: what the tests and `benchmarks.real_models` train."""

from benchmarks.zoo.language import LANGUAGE_MODELS
from benchmarks.zoo.model import SIZES, SMALL, TINY, Parts, RealModel, Size
from benchmarks.zoo.others import OTHER_MODELS
from benchmarks.zoo.perception import PERCEPTION_MODELS

ZOO = LANGUAGE_MODELS | PERCEPTION_MODELS | OTHER_MODELS

__all__ = ["SIZES", "SMALL", "TINY", "ZOO", "Parts", "RealModel", "Size"]
