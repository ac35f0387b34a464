"""Folders on the Hub: finding and downloading one, and pushing one.

`huggingface_hub` decides where the Hub is (`HF_ENDPOINT`), where downloads are kept (`HF_HOME`) and whether the network
may be used (`HF_HUB_OFFLINE`); it reads these when it is imported, which happens here at the first call.
"""

import logging
import os
import shlex
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from distaff.core.errors import CheckpointError, DistaffError, UsageError, listed
from distaff.hub.files import INDEX_SUFFIX, SINGLE, WEIGHT_NAMES

logger = logging.getLogger(__name__)

# Configs, vocabularies, SentencePiece models, chat templates.
COMPANIONS = (".json", ".txt", ".model", ".jinja")
# Hidden files hold caches and, in project folders, secrets.
NOT_PUSHED = ("checkpoints/*", "checkpoints-left-behind/*", "*.tmp", ".*", "*/.*", "*__pycache__/*", "wandb/*")


def resolve(
    name_or_dir: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    subfolder: str = "",
    local_files_only: bool = False,
    weights: bool = True,
) -> Path:
    """Return the folder that a path or a Hub id stands for, downloaded if need be.

    Of a repository only configs, tokenizer files and, if `weights`, the files of the preferred weight format are
    fetched. Without a connection the cached copy serves, with a logged warning. Whatever looks like a path (begins with
    a dot, a slash or ~, has two slashes, or its first part is a folder here) never reaches the network.
    """
    path = Path(name_or_dir).expanduser()
    name = os.fspath(name_or_dir)
    if not name:
        raise UsageError("The name of the model is empty: write a folder or a Hub id.")
    if path.is_dir():
        return _inside(path, subfolder)
    if path.exists():
        raise CheckpointError(f"'{name}' is a file, not a folder: name the folder that holds it.")
    if _looks_like_path(name):
        raise CheckpointError(f"The folder '{name}' does not exist: check its spelling.")
    if local_files_only or _offline():
        return _cached(name, revision, subfolder, weights, "nothing may be downloaded (offline)")
    return _download(name, revision, token, subfolder, weights)


def _inside(folder: Path, subfolder: str) -> Path:
    if not (folder / subfolder).is_dir():
        raise CheckpointError(f"'{folder}' has no subfolder '{subfolder}': check its spelling.")
    return folder / subfolder


def _looks_like_path(name: str) -> bool:
    first, *rest = name.split("/")
    return name.startswith((".", "/", "~")) or "\\" in name or len(rest) > 1 or bool(rest and Path(first).exists())


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _cached(name: str, revision: str | None, subfolder: str, weights: bool, reason: str) -> Path:
    """Return the cached snapshot, which no request is made for."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    config = str(PurePosixPath(subfolder, "config.json"))
    at = f" at revision '{revision}'" if revision else ""
    try:
        snapshot = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[config])
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"'{name}'{at} is neither a folder nor in the cache, and {reason}: connect, or name a folder."
        ) from error
    except HFValidationError as error:
        raise _bad_name(name) from error
    folder = _inside(Path(snapshot), subfolder)
    if weights and not any((folder / candidate).exists() for candidate in WEIGHT_NAMES):
        raise CheckpointError(
            f"The cache holds '{name}'{at} without its weights, and {reason}: connect once to fetch them."
        )
    return folder


def _bad_name(name: str) -> UsageError:
    return UsageError(
        f"'{name}' is neither a folder nor a Hub id: write an existing folder, 'name' or 'organisation/name'."
    )


def _download(name: str, revision: str | None, token: str | None, subfolder: str, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        # Not list_repo_files, which waits through five retries when there is no network.
        siblings = HfApi(token=token).model_info(name, revision=revision).siblings or []
        chosen = _wanted(name, [sibling.rfilename for sibling in siblings], subfolder, weights)
        snapshot = snapshot_download(name, revision=revision, token=token, allow_patterns=chosen)
        return _inside(Path(snapshot), subfolder)
    except HFValidationError as error:
        raise _bad_name(name) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"'{name}' is gated: ask for access on {_endpoint()}/{name}, then log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"'{name}' is neither a folder nor a repository on {_endpoint()} that you may read: check its spelling, "
            "or log in with `hf auth login` if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"'{name}' has no revision '{revision}': name a branch, a tag or a commit of it."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise CheckpointError(
                f"{_endpoint()} refused the token for '{name}' (HTTP {status}): log in with `hf auth login`."
            ) from error
        reason = f"{_endpoint()} answered with HTTP {status}"
    except (HTTPError, ConnectionError, LocalEntryNotFoundError):
        reason = f"{_endpoint()} cannot be reached"
    except OSError as error:
        raise CheckpointError(f"Cannot download '{name}': {error.strerror or error}.") from error
    folder = _cached(name, revision, subfolder, weights, reason)
    logger.warning("%s: using the cached copy of '%s'.", reason, name)
    return folder


def _wanted(name: str, listing: Iterable[str], subfolder: str, weights: bool) -> list[str]:
    """Return the files of `subfolder` to fetch: companions, and the weights of the first format that is there."""
    files = [PurePosixPath(file) for file in listing]
    paths = {path.name: path for path in files if path.parent == PurePosixPath(subfolder)}
    if not paths:
        raise CheckpointError(f"'{name}' holds no files in '{subfolder or '.'}': check the subfolder's spelling.")
    chosen = [file for file in paths if file.endswith(COMPANIONS) and not file.endswith(INDEX_SUFFIX)]
    if weights:
        first = next((candidate for candidate in WEIGHT_NAMES if candidate in paths), None)
        if first is None:
            raise CheckpointError(f"'{name}' holds no weights: looked for {listed(WEIGHT_NAMES)}.")
        chosen.append(first)
        if first.endswith(INDEX_SUFFIX):
            stem, suffix = os.path.splitext(first.removesuffix(INDEX_SUFFIX))
            chosen += [file for file in paths if file.startswith(f"{stem}-") and file.endswith(suffix)]
    # How sentence-transformers makes one vector of many stands in folders beside its list of them.
    pooling = [path for path in files if path.match("[0-9]_*/config.json") and len(path.parts) == 2]
    return [str(path) for path in [*(paths[file] for file in chosen), *(pooling if "modules.json" in chosen else [])]]


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    commit_message: str = "Upload with distaff",
    ignore_patterns: Iterable[str] = NOT_PUSHED,
) -> str:
    """Create the repository if it is new, upload `folder` in one commit, and return the repository's URL.

    Weights of an earlier push under other names (another number of shards) are deleted in the same commit. Raises
    `DistaffError` whose message ends with the command that tries again.

    With the hf-xet package, which huggingface_hub installs, large files go to the Hub's Xet storage; mirrors and other
    servers seldom have it. Set HF_HUB_DISABLE_XET=1 before Python starts to push to those.
    """
    if not os.fspath(folder) or not Path(folder).is_dir():
        state = "is a file, not a folder" if Path(folder).is_file() else "does not exist"
        raise UsageError(f"The folder '{folder}' {state}: nothing was pushed to '{repo_id}'.")
    folder = Path(folder)
    retry = f"distaff push {shlex.quote(str(folder))} {shlex.quote(repo_id)}"
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    if _offline():
        raise DistaffError(f"'{folder}' was not pushed because HF_HUB_OFFLINE is set: unset it and run: {retry}")
    if not (token or get_token()):
        raise DistaffError(
            f"'{folder}' was not pushed because no token is there: run `hf auth login` and then: {retry}"
        )
    api = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            commit_message=commit_message,
            ignore_patterns=list(ignore_patterns),
            delete_patterns=_weight_patterns(folder),
        )
    except HFValidationError as error:
        raise UsageError(
            f"'{repo_id}' is not a Hub id: write 'name' or 'organisation/name', as in: "
            f"distaff push {shlex.quote(str(folder))} ORG/NAME"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        refused = {401: "the token is not valid", 403: f"the token may not write to '{repo_id}'"}
        reason = refused.get(status, f"{_endpoint()} answered with HTTP {status} ({_first_line(error)})")
        raise DistaffError(f"'{folder}' was not pushed because {reason}: mend that and run: {retry}") from error
    except (HTTPError, ConnectionError) as error:
        raise DistaffError(
            f"'{folder}' was not pushed because {_endpoint()} cannot be reached: once connected run: {retry}"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise DistaffError(f"'{folder}' was not pushed ({_first_line(error)}): mend that and run: {retry}") from error
    return str(url)


def _weight_patterns(folder: Path) -> list[str]:
    """Return patterns for every name that weights of the kinds in `folder` may have had before."""
    patterns = []
    for single in SINGLE.values():
        if (folder / single).exists() or (folder / (single + INDEX_SUFFIX)).exists():
            stem, suffix = os.path.splitext(single)
            patterns += [single, single + INDEX_SUFFIX, f"{stem}-*-of-*{suffix}"]
    return patterns


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
