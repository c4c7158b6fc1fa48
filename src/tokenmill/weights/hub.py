"""Any model of Hugging Face by `hf:org/repo` (a safetensors folder) or `hf:org/repo:file` (a GGUF file)."""

from __future__ import annotations

from pathlib import Path

from tokenmill.core.errors import CatalogueError, ModelNotFound, TokenmillError
from tokenmill.weights.entries import hub_endpoint, parse_hub_name

_SNAPSHOT = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]


def fetch_hub(name: str, folder: Path) -> tuple[str, list[str]]:
    """Download into `folder`; returns (target, names of all files), both relative to it. Goes on after a break.

    Raises `ModelNotFound` for an unknown repository or file, `CatalogueError` when the hub cannot be used.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    repo, file = parse_hub_name(name)
    hub = HfApi(endpoint=hub_endpoint())
    try:
        offered = hub.list_repo_files(repo)
        if file is None:
            _check_folder(name, offered)
            hub.snapshot_download(repo, local_dir=folder, allow_patterns=_SNAPSHOT)
        else:
            _check_file(name, file, offered)
            hub.hf_hub_download(repo, file, local_dir=folder)
    except GatedRepoError:
        raise CatalogueError(f"{name}: the terms of {repo} must be accepted on its page first; then run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(f"{name}: {hub_endpoint()} has no public repository {repo}", param="model") from None
    except TokenmillError:
        raise
    except Exception as error:
        # The library's network errors belong to another HTTP package in each of its versions, so they have no common base.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CatalogueError(f"{name}: {hub_endpoint()} failed: {error}: try again, the download goes on where it stopped") from error
    if file is not None:
        return file, [file]
    return ".", [path.name for path in folder.iterdir() if path.is_file() and path.name in offered]


def _check_folder(name: str, offered: list[str]) -> None:
    if "config.json" in offered and any(path.endswith(".safetensors") for path in offered):
        return
    files = ", ".join(f"{name}:{path}" for path in offered if path.endswith(".gguf"))
    raise ModelNotFound(f"{name} has no safetensors model: {f'choose one of {files}' if files else 'choose another'}", param="model")


def _check_file(name: str, file: str, offered: list[str]) -> None:
    if file not in offered:
        files = ", ".join(path for path in offered if path.endswith(".gguf")) or "none"
        raise ModelNotFound(f"{name}: there is no such file, its .gguf files are: {files}", param="model")
