"""Training: recipes, and a loop that serves every operating point with one set of weights."""

from patchcure.train.recipe import Recipe
from patchcure.train.run import train

__all__ = ["Recipe", "train"]
