"""`manta check` and `manta serve` check a model's tokenizer and chat templates with these functions."""

from __future__ import annotations

import pathlib

import jinja2

from manta.cluster.config import EngineConfig
from manta.cluster.text.chat_template import ChatTemplates, TemplateError, template_process
from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text.tokenizer_files import read_tokenizer_config, resolve_folder
from manta.cluster.text.tokenizer_trial import try_tokenizer
from manta.workers.models.model_config import ModelConfig, ModelError


def check_templates(folder: pathlib.Path) -> None:
    try:
        config = read_tokenizer_config(folder)
        ChatTemplates(config.chat_templates).check(config.special_tokens)
        template_process().close()  # this process renders no more
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template of {folder} is no valid Jinja: {error}") from error
    except TemplateError as error:
        raise ModelError(str(error)) from error


def check_tokenizer(engine: EngineConfig, folder: pathlib.Path, tries: bool = True) -> Tokenizer:
    """Returns the tokenizer. Raises `ModelError` if it cannot be used; `tries` says whether to run it on probes."""
    source = engine.tokenizer or folder
    try:
        if tries:
            try_tokenizer(resolve_folder(source))
        return Tokenizer(source)
    except ModelError:
        raise
    except Exception as error:  # whatever an unexpected type of value leads to
        raise ModelError(f"the tokenizer of {source} cannot be read: {type(error).__name__}: {error}") from error


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raises `ModelError` if the tokenizer has more tokens than the model's vocabulary. Added tokens may lie beyond it;
    a prompt with such a token is refused later.
    """
    if tokenizer.base_vocab_size > model.vocab_size:
        raise ModelError(
            f"the tokenizer of {tokenizer.folder} has {tokenizer.base_vocab_size} tokens and the model's vocabulary "
            f"{model.vocab_size}, so it is another model's; give the right one in the option `tokenizer`"
        )
