"""Checkpoints of the Hugging Face Hub, which ``huggingface_hub`` downloads into its cache.

The cache, the token, offline mode and the address of the hub are configured as for every other user of that library,
by ``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT``.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hal.checkpoint.other_formats import close_path, no_folder, no_safetensors_among
from hal.errors import CheckpointError
from hal.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "*processor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "quant*.json",
    "hf_quant_config.json",
    "hf_quant_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
"""The files of a checkpoint, in its folder. The others of a repository are not downloaded."""
FOLDERS = ("[0-9]*_*/config.json", "[0-9]*_*/*.safetensors", "additional_chat_templates/*.jinja")
"""Those in folders of it: the modules after the model that modules.json lists, such as a pooling, and templates."""
DUPLICATES = "consolidated*.safetensors"
"""The same weights under other names, beside those that transformers reads."""

log = logging.getLogger("hal.checkpoint")


def folder_of(path: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return a path, or, where there is nothing and it is a name of the hub, the folder of the downloaded model.

    Raises:
        CheckpointError: as :func:`download`; or a path has a ``revision``.
    """
    # os.path accepts any string. pathlib raises for a path that is too long, and for an unknown user's home.
    found = Path(os.path.expanduser(path))
    if not os.path.exists(found) and _is_name(found):
        if found.parent.is_dir():
            log.warning("%s; asking the hub for a model of that name", no_folder(found).problem)
        return download(found.as_posix(), revision, weights=weights)
    if revision is not None:
        raise CheckpointError(f"{found} has no revision {revision!r}", "leave it out, or name a model of the hub")
    return found


def check_path(path: str | Path) -> None:
    """Raise CheckpointError for a path where nothing is, unless it is a name of the hub. Downloads nothing."""
    found = Path(os.path.expanduser(path))
    if not os.path.exists(found) and not _is_name(found):
        raise no_folder(found)


def _is_name(path: Path) -> bool:
    return NAME.fullmatch(path.as_posix()) is not None and path.suffix.lower() != ".gguf"


def download(
    name: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    endpoint: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Return the folder of a model of the hub in the cache, after downloading what the cache lacks.

    Each new file is compared with the hash that the hub lists. If the hub cannot be asked, the revision that the cache
    has is used, with a warning.

    Args:
        name: ``owner/model``.
        revision: a branch, tag or commit; None for the main branch.
        weights: whether to download the weights and the tokenizer; else config.json alone.
        endpoint: the address of the hub; None for that of ``huggingface_hub``.
        cache_dir: the folder of the cache; None for that of ``huggingface_hub``.

    Raises:
        CheckpointError: there is no such model or revision, it is no checkpoint in safetensors, the hub refuses it or
            cannot be reached, or what arrived is not what the hub lists.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(endpoint=endpoint, library_name="torch-hal", library_version=__version__)
    try:
        commit = api.model_info(name, revision=revision).sha
        listed = api.list_repo_tree(name, recursive=True, revision=commit)
        files = {each.path: each for each in listed if isinstance(each, RepoFile)}
    except Exception as error:  # its HTTP library's errors have no base in common, and differ between versions
        found = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir, revision=revision)
        if not isinstance(found, str):
            raise _explained(name, revision, error, api) from error
        log.warning("%s: the copy in %s is used", _explained(name, revision, error, api).problem, Path(found).parent)
        return Path(found).parent
    chosen = _chosen(name, files) if weights else ["config.json"]
    known = [try_to_load_from_cache(name, path, cache_dir=cache_dir, revision=commit) for path in chosen]
    new = [path for path, cached in zip(chosen, known, strict=True) if not isinstance(cached, str)]
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=[glob.escape(path) for path in chosen],
            endpoint=endpoint,
            cache_dir=cache_dir,
            tqdm_class=_progress_bar(),
        )
    except Exception as error:
        raise _explained(name, revision, error, api) from error
    for path in new:
        _check(name, Path(folder) / path, files[path])
    return Path(folder)


def _progress_bar() -> Any:
    """Return huggingface_hub's progress bar, which is shown on a terminal only."""
    from huggingface_hub import utils

    shown: Any = utils.tqdm  # type: ignore[attr-defined]

    class ProgressBar(shown):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": kwargs.get("disable") or not sys.stderr.isatty()})

    return ProgressBar


def _chosen(name: str, files: Iterable[str]) -> list[str]:
    """Return the files of a repository that make a checkpoint.

    Raises:
        CheckpointError: it has none, or a path leaves the repository's folder.
    """
    paths = sorted(files)
    for path in paths:
        if path.startswith("/") or "\\" in path or ".." in PurePosixPath(path).parts:
            raise CheckpointError(f"{name} lists the file {path!r}, outside its folder", "use another repository")
    top = [path for path in paths if "/" not in path and any(fnmatch(path, each) for each in FILES)]
    weights = [path for path in top if path.endswith(".safetensors")]
    if not weights or "config.json" not in top:
        raise no_safetensors_among(paths, name)
    if any(not fnmatch(path, DUPLICATES) for path in weights):
        top = [path for path in top if not fnmatch(path, DUPLICATES)]
    return top + [path for path in paths if path.count("/") == 1 and any(fnmatch(path, each) for each in FOLDERS)]


def _check(name: str, file: Path, listed: RepoFile) -> None:
    """Compare a downloaded file with its hash in the hub's list: SHA-256 for large files, git's SHA-1 for others.

    Raises:
        CheckpointError: they differ. The file is removed from the cache.
    """
    if listed.lfs is not None:
        expected = listed.lfs.sha256
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    else:
        expected, data = listed.blob_id, file.read_bytes()
        found = hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()
    if found != expected:
        stored = file.resolve()
        file.unlink()
        stored.unlink(missing_ok=True)
        raise CheckpointError(
            f"{file.name} of {name} arrived with the hash {found}, and the hub lists {expected}",
            "try again; if it happens again, something between here and the hub changes files",
        )


def _explained(name: str, revision: str | None, error: Exception, api: HfApi) -> CheckpointError:
    """Return the error for what huggingface_hub raised."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    here = f"there is no folder {name} here"
    if close := close_path(Path(name)):
        here += f" (did you mean {close}?)"
    login = "run `hf auth login`, or set HF_TOKEN to a token of your account"
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{name} is gated: its owners give access to accounts that asked for it",
            f"ask for it at {api.endpoint}/{name}, then {login}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{name} has no revision {revision!r}", f"see {api.endpoint}/{name}/tree/main")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{here}, and no model {name} at {api.endpoint}, or it is private",
            f"check the name; if the model is private, {login}",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return CheckpointError(
            f"{here}, {name} is not in the cache, and HF_HUB_OFFLINE forbids to download it",
            "set HF_HUB_OFFLINE=0, or give the path of a checkpoint's folder",
        )
    remedies: Mapping[int | None, str] = {
        401: login,
        403: login,
        429: f"wait some minutes; with an account, the hub allows more: {login}",
    }
    if status is not None:
        return CheckpointError(
            f"{api.endpoint} answered {status} for {name}",
            remedies.get(status, "try again later, or give the path of a checkpoint's folder"),
        )
    said = str(error).partition("\n")[0][:200] or "it gave no reason"
    return CheckpointError(
        f"{here}, and {name} cannot be downloaded from {api.endpoint}: {type(error).__name__}: {said}",
        "check the path; or, for a model of the hub, the network and HTTPS_PROXY",
    )
