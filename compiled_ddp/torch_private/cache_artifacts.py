"""What a process has put into Inductor's cache, packed for the cache of another machine."""

import io
import re
import zipfile
import zlib
from typing import Any

import torch

from compiled_ddp.torch_private import compiler_cache


class Made:
    """What this process puts into the cache from now on."""

    def __init__(self) -> None:
        self._portable, self._libraries = len(_portable()), _libraries()

    def packed(self) -> bytes:
        """It, for another machine: torch's portable artifacts, and the libraries that a C++ compiler has made."""
        from torch.compiler import _cache

        by_kind = dict[str, list[Any]]()
        for artifact in _portable()[self._portable :]:
            by_kind.setdefault(artifact.type(), []).append(artifact)
        serializer: Any = _cache.AppendingByteSerializer(serialize_fn=_cache._serialize_single_cache)
        serializer.extend(by_kind.items())
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as parts:
            parts.writestr(_TORCH, torch.__version__)
            parts.writestr(_PORTABLE, serializer.to_bytes())
            for key in _libraries() - self._libraries:
                for library in (compiler_cache.folder() / key[1:3]).glob(f"{key}.*so"):
                    parts.write(library, library.relative_to(compiler_cache.folder()).as_posix())
        return packed.getvalue()


_TORCH, _PORTABLE = "torch", "portable"  # parts of what is packed
_LIBRARY = re.compile(r"[a-z0-9]{2}/[a-z0-9]+(\.main)?\.so")  # the others, by where they lie in the cache


def take_in(packed: bytes) -> None:
    """Put what `Made.packed` gave into the cache. Raises ValueError where that is broken or not for here."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as parts:
            contents = {name: parts.read(name) for name in parts.namelist()}  # which checks them
        version, portable = contents.pop(_TORCH).decode(), contents.pop(_PORTABLE)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ValueError(f"it is broken or truncated ({error})") from error
    if version != torch.__version__:
        raise ValueError(f"it is torch {version}'s, and this is torch {torch.__version__}")
    if foreign := [name for name in contents if not _LIBRARY.fullmatch(name)]:
        raise ValueError(f"it has {foreign[0]!r} in it, which is no library of Inductor's")
    for name, content in contents.items():
        library = compiler_cache.folder() / name
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            compiler_cache.write_whole(library, content, mode=0o755)
    if torch.compiler.load_cache_artifacts(portable) is None:
        raise ValueError("torch could not read it")


def _portable() -> list[Any]:
    """All that this process has put into the cache so far or found there, as torch collects it."""
    from torch.compiler._cache import CacheArtifactManager

    return list(CacheArtifactManager._seen_artifacts)


def _libraries() -> set[str]:
    """The keys of those that C++ compilers have made for this process."""
    from torch._inductor import codecache

    kinds, keys = [codecache.CppCodeCache], set[str]()
    for kind in kinds:
        keys.update(kind.cache)
        kinds.extend(kind.__subclasses__())
    return keys
