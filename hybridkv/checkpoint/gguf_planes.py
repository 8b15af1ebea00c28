"""Which matrices of a GGUF file can stay packed, and the bytes of their planes (kernels/linear/packed_planes.py); and
which have 4-bit codes for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hybridkv.checkpoint.gguf_map import moved_heads
from hybridkv.checkpoint.recipe import Recipe
from hybridkv.kernels.linear.packed_planes import BITS, BLOCK, CODES4, GROUP, each_for, plane_bytes

Form = tuple[int, int]  # bits, columns for one d


def packed_form(recipe: Recipe, kind: Callable[[str], str]) -> Form | None:
    """The planes that a matrix can be kept in; None: it has to be dequantised. `kind`: a stored tensor's format."""
    kinds = {kind(part) for part in recipe.parts}
    heads = moved_heads(recipe)
    bits = BITS.get(kinds.pop()) if len(kinds) == 1 else None
    each = each_for(bits, recipe.shape[1], heads) if bits and heads else None
    return (bits, each) if bits and each else None


def column_step(recipe: Recipe, form: Form) -> int:
    """The columns at whose multiples a matrix can be cut and stay packed: whole blocks, or whole heads where these
    change places.
    """
    heads, bits = moved_heads(recipe), form[0]
    return recipe.shape[1] // heads if heads and heads > 1 else GROUP if bits == 8 else BLOCK


def column_steps(recipes: Mapping[str, Recipe], kind: Callable[[str], str]) -> dict[str, tuple[Form, int]]:
    """Name -> (bits, columns for one d) and `column_step`, for all that can stay packed."""
    found = {}
    for name, recipe in recipes.items():
        if form := packed_form(recipe, kind):
            found[name] = form, column_step(recipe, form)
    return found


def columns_fit(form: Form, step: int, begin: int, end: int) -> bool:
    """Whether columns `begin` to `end` of a packed matrix are one: at multiples of its step, and whole blocks."""
    return begin % step == end % step == 0 and (end - begin) % (GROUP if form[0] == 8 else BLOCK) == 0


def packed_bytes(recipes: Mapping[str, Recipe], kind: Callable[[str], str]) -> dict[str, int]:
    """Name -> bytes of the planes, for all that can be kept in them."""
    found = {}
    for name, recipe in recipes.items():
        if form := packed_form(recipe, kind):
            rows, columns = recipe.shape
            found[name] = rows * sum(plane_bytes(form[0], columns, form[1]))
    return found


def codes4_form(recipe: Recipe, kind: Callable[[str], str]) -> str | None:
    """The format of a matrix whose 4-bit codes a CPU can multiply; None: it has none, or columns change places."""
    kinds = {kind(part) for part in recipe.parts}
    found = kinds.pop() if len(kinds) == 1 and moved_heads(recipe) == 1 else None
    return found if found in CODES4 and recipe.shape[1] % GROUP == 0 else None
