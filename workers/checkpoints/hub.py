"""Files of a repository of the Hugging Face hub: found in the hub's cache, or downloaded."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from manta.workers.models.model_config import ModelError


def download(name: str, patterns: Sequence[str]) -> pathlib.Path:
    """Returns the folder with the files of `name` that match one of the patterns. `name` is a hub id, or `ID@REVISION`
    with a commit, tag or branch; only a commit never changes. Raises `ModelError` if the hub cannot be read.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hub_id, _, revision = name.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=["original/*"]
        )
    except HFValidationError as error:
        raise ModelError(f"{hub_id!r} is neither a folder nor a Hugging Face hub id") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{hub_id!r} is no folder, and the Hugging Face hub cannot be reached to download it; "
            "give a local folder, or connect to the hub (or a mirror, by HF_ENDPOINT)"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"the Hugging Face hub refused {name!r} ({error}); check its name, and if it is gated set HF_TOKEN"
        ) from error
    except OSError as error:
        raise ModelError(f"downloading {hub_id!r} failed ({error}); give a local folder instead") from error
    return pathlib.Path(folder)
