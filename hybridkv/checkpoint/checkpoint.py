"""A model on disk, whatever its format: `open_checkpoint` gives it Hugging Face names, shapes and values.

A checkpoint is a folder (config.json with model.safetensors, or an index and its shards) or one GGUF file. The files
are opened and checked as a whole at once; tensors are read one by one when asked for. No code from a model folder is
ever run and pickle is never loaded. What is special about one model family's files comes in as `Layouts`, which
`hybridkv.models.open_checkpoint` fills in; the meaning of a config is left to `models/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridkv.checkpoint.gguf_file import KEPT, GgufFile
from hybridkv.checkpoint.gguf_map import map_gguf, orders
from hybridkv.checkpoint.gguf_planes import Form, codes4_form, column_step, column_steps, packed_bytes, packed_form
from hybridkv.checkpoint.layouts import Layouts
from hybridkv.checkpoint.recipe import Recipe
from hybridkv.checkpoint.safetensors_file import SafetensorsFile
from hybridkv.checkpoint.safetensors_store import SafetensorsStore
from hybridkv.dtypes import torch_dtype
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.files import read_json, read_json_if_any
from hybridkv.kernels.linear.block_form import BlockForm, Span
from hybridkv.kernels.linear.block_scaled import BlockScaled, put_blocks
from hybridkv.kernels.linear.int4 import Codes4
from hybridkv.kernels.linear.packed_weights import Packed, pack, unpack_codes4

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
READERS = 4  # threads that read experts: a disk gives more to several, and codes are checked meanwhile
INDEX_LIMIT = 64 << 20  # bytes
_DAMAGED = "the file is damaged or was badly converted: download it again, or take another conversion of the model"
NOT_FINITE = f"holds NaN or infinity; {_DAMAGED}"
NOT_CODES = f"holds NaN among its codes or scales, or scales that no model has; {_DAMAGED}"

_ASIDE = (
    ("mtp", re.compile(r"(model\.|language_model\.)*mtp\.")),
    ("vision", re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")),
    ("rotary", re.compile(r".*\brotary_emb\.inv_freq$")),
)
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_BARE = ("embed_tokens.", "layers.", "norm.")  # a model saved without its head: names lack "model."
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")


class _Store(Protocol):
    """The stored tensors of one model, under their stored names."""

    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def nbytes(self, name: str) -> int: ...
    def read(self, name: str) -> Tensor: ...
    def expert(self, recipe: Recipe, expert: int) -> Iterator[Tensor]: ...
    def close(self) -> None: ...


class Checkpoint:
    """One opened model. `names()` are Hugging Face text-model names; `read` gives CPU tensors that own their memory."""

    def __init__(
        self,
        path: Path,
        kind: str,
        config: dict[str, Any],
        recipes: dict[str, Recipe],
        store: _Store,
        set_aside: dict[str, int],
        metadata: dict[str, Any],
    ) -> None:
        self.path, self.kind, self.config = path, kind, config
        self.files = [path]  # that hold weights
        self.set_aside = set_aside  # why -> how many tensors were recognised and are not loaded
        self.metadata = metadata  # GGUF keys, for the tokenizer; empty for safetensors
        self._recipes, self._store = recipes, store
        self.nbytes = sum(store.nbytes(name) for name in {part for r in recipes.values() for part in r.parts})

    @cached_property
    def generation(self) -> dict[str, Any]:
        """generation_config.json of a folder, read once: end tokens, sampling settings. Empty where there is none."""
        return read_json_if_any(self.path / "generation_config.json") if self.kind == "safetensors" else {}

    @property
    def narrow(self) -> bool:
        """Whether most values are stored in 16 bits or fewer."""
        return self.nbytes < 3 * sum(prod(recipe.shape) for recipe in self._recipes.values())

    def names(self) -> list[str]:
        return list(self._recipes)

    def __contains__(self, name: object) -> bool:
        return name in self._recipes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._recipe(name).shape

    def read(self, name: str) -> Tensor:
        """F32, F16, BF16 and integers as stored, quantised weights as float32, or as bfloat16 where it holds them
        exactly.
        """
        recipe = self._recipe(name)
        if recipe.experts:
            dtypes = {self._store.dtype(part) for part in recipe.parts}
            out = torch.empty(recipe.shape, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32)
            self.read_into(out, name)
            return out
        parts = [self._store.read(part) for part in recipe.parts]
        tensor = (recipe.make(*parts) if recipe.make else parts[0]).reshape(recipe.shape).contiguous()
        self._check_finite(name, tensor)
        return tensor

    def read_into(self, out: Tensor, name: str) -> None:
        """Fill `out`, which may have another dtype and device. Experts are read one by one: the peak is one of them."""
        recipe = self._recipe(name)
        if not recipe.experts:
            out.copy_(self.read(name))
            return
        for expert in range(recipe.experts):
            for row, piece in self.expert_rows(name, expert):
                out[expert, row : row + len(piece)] = piece

    def experts(self, name: str) -> int:
        """How many experts a tensor holds that is read one by one; 0: it is read whole."""
        return self._recipe(name).experts

    def expert_rows(self, name: str, expert: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, [rows, columns]) of one expert, piece by piece."""
        row = 0
        for piece in self._store.expert(self._recipe(name), expert):
            self._check_finite(name, piece)
            yield row, piece
            row += len(piece)

    def packed_form(self, name: str) -> Form | None:
        """(bits, columns for one d) of the planes that a matrix can be kept in; None: it has to be dequantised."""
        if not isinstance(self._store, _GgufStore):
            return None
        return packed_form(self._recipe(name), self._store.kind)

    def packed_bytes(self) -> dict[str, int]:
        """Name -> bytes of the planes, for all that can be kept in them."""
        return packed_bytes(self._recipes, self._store.kind) if isinstance(self._store, _GgufStore) else {}

    def column_steps(self) -> dict[str, tuple[Form, int]]:
        """Name -> packed form, and the columns at whose multiples it can be cut, for all that can stay packed."""
        return column_steps(self._recipes, self._store.kind) if isinstance(self._store, _GgufStore) else {}

    def read_packed(self, name: str, device: torch.device, columns: tuple[int, int] | None = None) -> Packed:
        """A matrix that has a packed form, on the device. `columns`: some of them, for which columns_fit holds."""
        recipe, form = self._recipe(name), self.packed_form(name)
        assert isinstance(self._store, _GgufStore) and form is not None
        parts = [self._store.blocks(part).to(device) for part in recipe.parts]
        rows, order = orders(recipe, [len(part) for part in parts])
        count = None
        if columns is not None:
            step = column_step(recipe, form)
            count = recipe.shape[1] // step
            order = (torch.arange(count) if order is None else order)[columns[0] // step : columns[1] // step]
        packed = pack(parts[0] if len(parts) == 1 else torch.cat(parts), form[0], order, count)
        self._check_finite(name, packed.factors())
        return packed if rows is None else packed.rows(rows.to(device))

    def codes4_names(self) -> frozenset[str]:
        """The matrices whose 4-bit codes a CPU can multiply."""
        if not isinstance(self._store, _GgufStore):
            return frozenset()
        return frozenset(name for name, recipe in self._recipes.items() if codes4_form(recipe, self._store.kind))

    def read_codes4(self, name: str) -> Codes4:
        """One of codes4_names."""
        recipe = self._recipe(name)
        assert isinstance(self._store, _GgufStore)
        form = codes4_form(recipe, self._store.kind)
        assert form is not None
        parts = [self._store.blocks(part) for part in recipe.parts]
        rows, _ = orders(recipe, [len(part) for part in parts])
        codes = unpack_codes4(parts[0] if len(parts) == 1 else torch.cat(parts), form)
        return codes if rows is None else codes.rows(rows)

    def block_form(self, name: str) -> BlockForm | None:
        """How a matrix, or each of a stack of experts, can be kept as the codes and scales of the file; None: it has to
        be read as its values.
        """
        recipe = self._recipe(name)
        if not isinstance(self._store, SafetensorsStore) or recipe.make is not None:
            return None
        forms = {self._store.block_form(part) for part in recipe.parts}
        form = forms.pop()
        if forms or form is None or not form.kept:
            return None
        each = len(recipe.parts) // recipe.experts if recipe.experts else 1
        return form.joined(*(self._store.shape(part)[0] for part in recipe.parts[:each]))

    def block_forms(self) -> dict[str, BlockForm]:
        """Name -> form, for all that can be kept so."""
        return {name: form for name in self._recipes if (form := self.block_form(name)) is not None}

    def read_blocks_into(
        self,
        out: BlockScaled,
        name: str,
        experts: range | None = None,  # some of them; None: all
        rows: Sequence[Span] | None = None,  # of a matrix, or of each expert; no others are read
        columns: Span | None = None,
    ) -> None:
        """Codes and scales, or a part of them, into room that has the form of block_form, or one with smaller blocks.
        Experts are read by several threads, each with one matrix in memory beside `out`.
        """
        recipe = self._recipe(name)
        assert isinstance(self._store, SafetensorsStore)
        if not recipe.experts:
            self._put_blocks(out, name, recipe.parts, rows, columns)
            return
        each = len(recipe.parts) // recipe.experts

        def put(place: int, expert: int) -> None:
            self._put_blocks(out[place], name, recipe.parts[expert * each : (expert + 1) * each], rows, columns)

        with ThreadPoolExecutor(READERS) as readers:
            wanted = range(recipe.experts) if experts is None else experts
            waiting = [readers.submit(put, place, expert) for place, expert in enumerate(wanted)]
            try:
                for one in waiting:
                    one.result()
            finally:
                for one in waiting:
                    one.cancel()  # after an error, or Ctrl-C, nothing more is read

    def _put_blocks(
        self, out: BlockScaled, name: str, parts: Sequence[str], rows: Sequence[Span] | None, columns: Span | None
    ) -> None:
        """Stored matrices, one below the other, of which these rows are wanted."""
        row = first = 0
        for part in parts:
            N = self._store.shape(part)[0]
            for begin, end in ((first, first + N),) if rows is None else rows:
                low, high = max(begin - first, 0), min(end - first, N)
                if low < high:
                    self._put_rows(out, row, name, part, None if high - low == N else (low, high), columns)
                    row += high - low
            first += N

    def _put_rows(
        self, out: BlockScaled, row: int, name: str, part: str, rows: Span | None, columns: Span | None
    ) -> None:
        """Of one stored matrix, which is let go before the next one is read."""
        assert isinstance(self._store, SafetensorsStore)
        found = self._store.read_blocks(part, rows)
        if not found.finite():
            raise ModelFileError(f"{str(self.path)!r}: tensor {name!r} {NOT_CODES}")
        put_blocks(out, row, found, 0 if rows is None else rows[0] % found.form.rows, columns)

    def _recipe(self, name: str) -> Recipe:
        if name not in self._recipes:
            raise ModelFileError(f"{str(self.path)!r}: the model has no tensor {name!r}")
        return self._recipes[name]

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
            return
        raise ModelFileError(f"{str(self.path)!r}: tensor {name!r} {NOT_FINITE}")

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(model: str | Path, layouts: Layouts) -> Checkpoint:
    """Open a folder of safetensors, a .gguf file, or a folder that holds one .gguf file and no config.json."""
    path = Path(model)
    try:
        return _open(path, layouts)
    except OSError as error:  # a folder that may not be listed, and the like
        raise ModelFileError(f"{str(path)!r}: {error}") from None


def _open(path: Path, layouts: Layouts) -> Checkpoint:
    _refuse_pickle(path)
    if not path.exists():
        raise ModelFileError(f"{str(path)!r}: there is no such file or folder; give a model folder or a .gguf file")
    is_folder = path.is_dir()
    if is_folder and not (path / "config.json").exists():
        found = sorted(entry for entry in path.iterdir() if entry.suffix.lower() == ".gguf")
        if len(found) != 1:
            many = f"{len(found)} .gguf files; name the one you mean" if found else "no .gguf file"
            raise ModelFileError(f"{str(path)!r} has no config.json and {many}")
        is_folder, path = False, found[0]
    if is_folder:
        return _open_folder(path, layouts)
    if path.suffix.lower() != ".gguf":
        hint = "give the folder it is in" if path.suffix == ".safetensors" else "give a model folder or a .gguf file"
        raise ModelFileError(f"{str(path)!r} is not a model that can be opened; {hint}")
    file = GgufFile(path)
    try:
        found = map_gguf(file, layouts.gguf)
        store = _GgufStore(file)
        return Checkpoint(path, "gguf", found.config, found.recipes, store, found.set_aside, file.metadata)
    except BaseException:
        file.close()
        raise


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in PICKLES:
        raise ModelFileError(f"{str(path)!r} is a pickle by its name; hybridkv never loads pickle: use safetensors")


class _GgufStore:
    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(KEPT.get(self._file.tensors[name].type, "float32"))

    def nbytes(self, name: str) -> int:
        return self._file.tensors[name].nbytes

    def read(self, name: str) -> Tensor:
        return self._file.dequantise(self._file.tensors[name])

    def kind(self, name: str) -> str:
        return self._file.tensors[name].type.name

    def blocks(self, name: str) -> Tensor:
        return self._file.blocks(self._file.tensors[name])

    def expert(self, recipe: Recipe, expert: int) -> Iterator[Tensor]:
        for name in recipe.parts:  # [E, rows, columns] each
            tensor = self._file.tensors[name]
            rows = tensor.n_rows // recipe.experts
            yield self._file.rows(tensor, expert * rows, (expert + 1) * rows)

    def close(self) -> None:
        self._file.close()


def _open_folder(folder: Path, layouts: Layouts) -> Checkpoint:
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    layout = layouts.folders.get(str(config.get("model_type")))
    quantised = text.get("quantization_config") or config.get("quantization_config")
    if quantised and layout is None:
        method = str(quantised.get("quant_method", "unknown"))[:40] if isinstance(quantised, dict) else "unknown"
        raise UnsupportedModel(
            f"{str(folder)!r}: is quantised ({method}); use BF16, F16 or F32 safetensors, or a quantised GGUF file"
        )
    files: list[SafetensorsFile] = []
    try:
        paths, index = _shards(folder)
        for path in paths:
            files.append(SafetensorsFile(path))
        store = SafetensorsStore(files) if layout is None else layout.open_store(files, quantised)
        for name, shard in index.items():
            if store.file_of(name) != shard:
                raise ModelFileError(
                    f"{str(folder)!r}: the index has tensor {name[:200]!r} in {shard!r}, which lacks it"
                )
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True
        rename = hugging_face_name if layout is None else layout.rename
        recipes, set_aside = _canonical(folder, store, tied, rename)
        found = Checkpoint(folder, "safetensors", config, recipes, store, set_aside, {})
        found.files = paths
        return found
    except BaseException:
        for file in files:
            file.close()
        raise


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to open, and the index: tensor name -> file name."""
    single, index_path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or single.is_symlink():
        return [single], {}
    if not index_path.exists():
        names = sorted(entry.name for entry in folder.iterdir())
        if any(name.lower().endswith(PICKLES) for name in names):
            raise ModelFileError(f"{str(folder)!r}: has pickle weights; hybridkv never loads pickle: use safetensors")
        ggufs = [name for name in names if name.lower().endswith(".gguf")]
        hint = f"; to use {ggufs[0]!r}, give its path" if ggufs else ""
        raise ModelFileError(f"{str(folder)!r}: has neither model.safetensors nor model.safetensors.index.json{hint}")
    index = read_json(index_path, INDEX_LIMIT).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(shard, str) for shard in index.values()):
        raise ModelFileError(f"{str(index_path)!r}: weight_map must map tensor names to file names")
    shards = sorted(set(index.values()))
    for shard in shards:
        _refuse_pickle(Path(shard))
        if not shard.endswith(".safetensors") or re.search(r"[/\\\x00]", shard):
            raise ModelFileError(f"{str(index_path)!r}: {shard[:200]!r} is not the plain name of a .safetensors file")
        if not (folder / shard).exists():
            raise ModelFileError(f"{str(folder)!r}: the shard {shard!r} is missing; is the download complete?")
    return [folder / shard for shard in shards], index


def hugging_face_name(name: str) -> str:
    """The canonical name of a tensor of the text model, which may lie inside another model or lack its head."""
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return "model." + name if name.startswith(_BARE) else name


def _canonical(
    folder: Path, store: SafetensorsStore, tied: bool, rename: Callable[[str], str]
) -> tuple[dict[str, Recipe], dict[str, int]]:
    """Stored names to canonical ones; what is recognised and not wanted is counted."""
    set_aside: dict[str, int] = {}
    recipes: dict[str, Recipe] = {}
    experts: dict[str, dict[tuple[int, str], str]] = {}

    def add(canonical: str, recipe: Recipe) -> None:
        if canonical in recipes:
            raise ModelFileError(f"{str(folder)!r}: two tensors stand for {canonical[:200]!r}")
        recipes[canonical] = recipe

    for name in store.names():
        why = next((why for why, pattern in _ASIDE if pattern.match(name)), None)
        canonical = rename(name)
        if why is None and tied and canonical == "lm_head.weight":
            why = "tied"
        if why is not None:
            set_aside[why] = set_aside.get(why, 0) + 1
            continue
        store.dtype(name)  # refuses what is not read
        shape = store.shape(name)
        if 0 in shape:
            raise ModelFileError(f"{str(folder)!r}: tensor {name[:200]!r} has shape {list(shape)}: no values")
        if match := _EXPERT.fullmatch(canonical):
            parts = experts.setdefault(match[1], {})
            if (int(match[2]), match[3]) in parts:
                raise ModelFileError(f"{str(folder)!r}: two tensors stand for {canonical[:200]!r}")
            parts[int(match[2]), match[3]] = name
        else:
            add(canonical, Recipe((name,), shape))
    for prefix, parts in experts.items():
        for canonical, kinds in ((f"{prefix}.gate_up_proj", ("gate", "up")), (f"{prefix}.down_proj", ("down",))):
            add(canonical, _expert_recipe(folder, store, prefix, parts, kinds))
    return recipes, set_aside


def _expert_recipe(
    folder: Path, store: SafetensorsStore, prefix: str, parts: dict[tuple[int, str], str], kinds: tuple[str, ...]
) -> Recipe:
    count = 1 + max(expert for expert, _ in parts)
    names = []
    for expert in range(min(count, len(parts) + 1)):  # a gap shows within as many steps
        for kind in kinds:
            if (expert, kind) not in parts:
                raise ModelFileError(
                    f"{str(folder)!r}: '{prefix}.{expert}.{kind}_proj.weight' is missing, of {count} experts"
                )
            names.append(parts[expert, kind])
    shapes = {store.shape(name) for name in names}
    shape = shapes.pop()
    if shapes or len(shape) != 2:
        raise ModelFileError(f"{str(folder)!r}: the {'/'.join(kinds)} matrices of '{prefix}' differ in shape")
    return Recipe(tuple(names), (count, len(kinds) * shape[0], shape[1]), experts=count)
