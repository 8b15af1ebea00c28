"""`hybridkv cache`: what is saved in a folder of caches: listed, shown, checked, removed. It needs no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Exit

from hybridkv.commands import completion
from hybridkv.commands.declaring import with_options

if TYPE_CHECKING:
    from hybridkv.cache.manifest import Manifest
    from hybridkv.cache.store import Store

ACTIONS = ("list", "show", "rm", "verify")


@with_options
def cache(
    *,
    action: Annotated[str, Argument(metavar="ACTION", help="list, show, rm or verify")],
    folder: Annotated[
        str,
        Argument(metavar="DIR", help="the folder that was given as --disk-cache", autocompletion=completion.any_file),
    ],
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="saved caches; verify: all, where none is named")
    ] = None,
) -> None:
    """List, show, remove or verify the conversations that are saved in a folder.

    list: name, tokens, size and age of each. show: what one was computed with, and its parts. rm: forget some; what no
    other one shares is removed from the disk. verify: read everything and compare it with its checksums.
    """
    if action not in ACTIONS:
        raise BadParameter(f"ACTION must be one of {', '.join(ACTIONS)}, not {action!r}")
    from hybridkv.cache.store import Store, check_name

    store, named = Store(folder), names or []
    for name in named:
        check_name(name)
    if not store.path.is_dir():
        raise BadParameter(f"DIR: there is no folder {folder!r}")
    if action in ("show", "rm") and not named:
        raise BadParameter(f"{action} needs the NAME of a saved cache; hybridkv cache list {folder} shows them")
    if action == "list":
        _list(store)
    elif action == "show":
        for name in named:
            _show(name, store.manifest(name))
    elif action == "rm":
        for name in named:
            print(f"removed {name}, {_size(store.remove(name))} of the disk are free again")
    else:
        _verify(store, named)


def _list(store: Store) -> None:
    found = store.saved()
    for each in found:
        if each.manifest is None:
            print(f"{each.name:30} {_plain(each.problem)}")
        else:
            print(f"{each.name:30} {_line(each.manifest)}")
    shared = f", {_size(store.bytes)} on the disk" if found else ""
    print(f"{len(found)} saved{shared}")


def _line(manifest: Manifest) -> str:
    from hybridkv.cache.store import age

    sizes, seconds = manifest.sizes, age(manifest)
    counts = [count for each in sizes.kept.values() for count in each]
    kept = f", {sum(counts) // len(counts)} kept at {sizes.compacted_at}" if counts else ""
    cache = f"{sizes.position} cached{kept}" if sizes.position else "no cache"
    unit, count = next((u, s) for u, s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)) if seconds >= s or s == 1)
    model = _plain(manifest.about.get("model", "-"))
    return (
        f"{sizes.tokens:>8} tokens, {cache}, {_size(manifest.bytes):>10}, {int(seconds // count)} {unit} ago, {model}"
    )


def _show(name: str, manifest: Manifest) -> None:
    print(f"{name}: {_line(manifest)}")
    for part, value in {**manifest.about, **manifest.key}.items():
        print(f"  {_plain(part):14} {_plain(value)}")
    for words in manifest.converted:
        print(f"  converted      {_plain(words)}")
    for part in manifest.parts:
        where = f"{part.begin:>8} to {part.end:<8}"
        print(f"  part {_plain(part.what):16} {where} {_size(part.bytes):>10}  {part.sha256[:16]}")


def _verify(store: Store, names: list[str]) -> None:
    wrong = 0
    for each in store.saved():
        if names and each.name not in names:
            continue
        problems = [each.problem] if each.manifest is None else store.verify(each.name)
        wrong += bool(problems)
        for problem in problems:
            print(f"{each.name}: {_plain(problem)}")
        if not problems:
            print(f"{each.name}: good")
    for name in [name for name in names if name not in {each.name for each in store.saved()}]:
        store.manifest(name)  # says what there is
    if wrong:
        raise Exit(1)


def _size(nbytes: int) -> str:
    from hybridkv.planner import human

    return human(nbytes)


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:300]
