"""Reinforcement-learning objectives of language-model papers as pure functions of arrays.

losses.get("minpro_loss")              the bare function
losses.paper("qae")                    the paper's own composition, one function of arrays
losses.papers()                        the catalogue
losses.compose(advantage="rloo", objective="gspo", regularizers=["entropy-bonus"])
"""

from losses.catalogue import CatalogueError, Composed, Paper, Stage, compose, entry, get, papers
from losses.catalogue import paper_function as paper

__all__ = [
    "CatalogueError",
    "Composed",
    "Paper",
    "Stage",
    "compose",
    "entry",
    "get",
    "paper",
    "papers",
]
