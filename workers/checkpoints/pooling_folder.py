"""Reads whether and how a checkpoint pools: sentence-transformers' modules, cross-encoders, bare encoders, and models
that generate and score pairs of texts by the logits of two tokens.

Refuses by name what it does not know, because a module that is left out gives other vectors. The engine, the ingress
and `manta check` call it. Imports no framework. Source of the formats: sentence-transformers' `modules.json`,
`N_Pooling/config.json`, `N_Dense/config.json`, `sentence_bert_config.json` and `config_sentence_transformers.json`.
"""

from __future__ import annotations

import pathlib
from typing import Any, cast, get_args

import msgspec

from manta.workers.checkpoints.memory import is_gguf_folder
from manta.workers.checkpoints.reranker_card import PROMPTS, answer_ids, is_named_reranker
from manta.workers.checkpoints.stored_files import COPY_AGAIN, MOST_JSON_BYTES, find_file, read_json, read_text
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import RawConfig, RawValue
from manta.workers.pooling_info import (
    Activation,
    DenseLayer,
    PoolingInfo,
    PoolingMode,
    PromptMessages,
    TaskOption,
)

_MODULES = "modules.json"
_TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""Names of the transformer module's configuration, of which the first that exists counts."""
_SERVED = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
"""Modules of sentence-transformers that are served. `Dropout` does nothing after training."""
_CLASSIFIER = "ForSequenceClassification"
_GENERATOR = "ForCausalLM"
_OLDER_GENERATOR = "LMHeadModel"
"""How the classes of some older families end that generate, such as BertLMHeadModel."""
_ENCODER_ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining")
_ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "eurobert",
        "ernie",
        "gte",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    }
)
"""Model types that read a text in both directions. Without modules, sentence-transformers takes their mean."""
_ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_LEGACY_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of older files, in the order in which their vectors are joined."""
_POOLING_KEYS = {"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *_LEGACY_MODES}
_DENSE_KEYS = {
    "in_features",
    "out_features",
    "bias",
    "activation_function",
    "module_input_name",
    "module_output_name",
    "use_residual",
}
_TRANSFORMER_KEYS = {
    "max_seq_length",
    "do_lower_case",
    "transformer_task",
    "modality_config",
    "module_output_name",
    "processing_kwargs",
    "unpad_inputs",
    "query_length",
    "document_length",
    "query_expansion",
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
}
_POOLED = "sentence_embedding"
"""Name under which sentence-transformers' modules pass on the pooled vector."""
_LOGIT_SCORE = "LogitScore"
"""Module of sentence-transformers that makes a score of the logits at a prompt's end."""
_LOGIT_SCORE_KEYS = {"true_token_id", "false_token_id", "module_input_name"}
_LOGITS = "causal_logits"
"""Name under which sentence-transformers' modules pass on the logits."""
_MESSAGE = "message"
"""Modality of a transformer module that reads messages."""
_TEMPLATE_VARIABLES = "chat_template"
"""Key of `processing_kwargs` whose values the chat template gets."""
_RESTORES_END = "restore_suffix"
"""Key among them that has truncation keep the prompt's end, which is always so here."""
_ABOUT_TOKENS = {"max_length", "padding", "return_tensors", "truncation"}
"""Keys among them that are not for the template."""
_UNLIMITED_TOKENS = 10**9
"""Tokenizers that know no longest text name a larger number than this."""


class _Module(msgspec.Struct, frozen=True):
    """An entry of `modules.json`."""

    type: str
    path: str = ""


def read_pooling(folder: pathlib.Path, task: TaskOption = "auto") -> PoolingInfo | None:
    """Returns how the checkpoint in `folder` pools; None if it generates. `task` is the option of that name.

    Raises `ModelError` naming the module or the key that is not served, or a task that the checkpoint cannot have.
    """
    if task == "generate":
        return None
    if find_file(folder, "config.json") is None:
        if task != "auto":
            raise ModelError(f"task {task} needs a config.json, and {folder} has none; leave task out")
        return None
    raw = _read(folder, "config.json")
    info = _published(folder, raw)
    if task == "auto":
        return info
    if info is None:
        return _converted(folder, raw, task)
    if not (info.task == "embed" if task == "embed" else info.scores_pairs):
        what = "embeddings" if info.task == "embed" else f"{info.dimension} labels for a text"
        raise ModelError(f"task {task} is not what {folder} was made for, which is {what}; leave task out")
    return info


def _model_type(raw: RawConfig) -> str:
    found = raw.values.get("model_type")
    return found if isinstance(found, str) else ""


def _published(folder: pathlib.Path, raw: RawConfig) -> PoolingInfo | None:
    """Returns how a checkpoint pools by what its own files say."""
    architecture = raw.architecture or ""
    if architecture.endswith(_CLASSIFIER):
        return _classifier(folder, raw)
    if find_file(folder, _MODULES) is not None:
        modules = _modules(folder)
        return _scorer(folder, raw, modules) if _LOGIT_SCORE in map(_class_of, modules) else _embedder(folder, raw)
    is_encoder = architecture.endswith(_ENCODER_ENDINGS) and not architecture.endswith(_OLDER_GENERATOR)
    if is_encoder and _model_type(raw) in _ENCODERS:
        source = f"no {_MODULES}: the mean of the tokens, as in sentence-transformers"
        return _without_modules(folder, raw, "mean", False, source)
    if architecture.endswith(_GENERATOR) and _model_type(raw) in PROMPTS and is_named_reranker(folder):
        return _by_answers(folder, raw, "its page")
    return None


def _converted(folder: pathlib.Path, raw: RawConfig, task: TaskOption) -> PoolingInfo:
    """Returns how a checkpoint that generates pools because it is asked to."""
    architecture = raw.architecture or "it"
    if not architecture.endswith(_GENERATOR) or is_gguf_folder(folder):
        form = "is a GGUF file" if is_gguf_folder(folder) else f"has {architecture}"
        raise ModelError(f"task {task} needs safetensors of a ...{_GENERATOR}, and {folder} {form}; leave task out")
    source = f"the option task, {task}"
    if task == "score":
        return _by_answers(folder, raw, source)
    return _without_modules(folder, raw, "lasttoken", True, source)


def _without_modules(
    folder: pathlib.Path, raw: RawConfig, mode: PoolingMode, normalises: bool, source: str
) -> PoolingInfo:
    return PoolingInfo(
        task="embed",
        modes=(mode,),
        normalises=normalises,
        dimension=_hidden_size(raw),
        max_tokens=_longest(folder, None),
        source=source,
    )


# ---- modules of sentence-transformers --------------------------------------------------------------------------------


def _embedder(folder: pathlib.Path, raw: RawConfig) -> PoolingInfo:
    modules = _modules(folder)
    names = [_class_of(module) for module in modules]
    for name, module in zip(names, modules, strict=True):
        if name not in _SERVED:
            raise ModelError(f"{folder / _MODULES}: the module {module.type} is not served; served are {_SERVED}")
    if names[:2] != ["Transformer", "Pooling"] or names.count("Transformer") + names.count("Pooling") != 2:
        raise ModelError(f"{folder / _MODULES} must begin with one Transformer and one Pooling, not {names}")
    if modules[0].path:
        raise ModelError(f"{folder / _MODULES}: the Transformer lies in {modules[0].path}; move its files up")
    if "Normalize" in names[:-1] and any(name == "Dense" for name in names[names.index("Normalize") :]):
        raise ModelError(f"{folder / _MODULES}: a Dense after Normalize is not served")
    transformer = _transformer(folder, "feature-extraction")
    modes, includes_prompt = _pooling(folder, modules[1].path)
    dense = tuple(_dense(folder, module.path) for name, module in zip(names, modules, strict=True) if name == "Dense")
    dimension = _hidden_size(raw) * len(modes)
    for layer in dense:
        if layer.in_features != dimension:
            raise ModelError(f"{folder / layer.folder}: in_features must be {dimension}, not {layer.in_features}")
        dimension = layer.out_features
    prompts, default = _prompts(folder)
    return PoolingInfo(
        task="embed",
        modes=modes,
        includes_prompt=includes_prompt,
        dense=dense,
        normalises="Normalize" in names,
        dimension=dimension,
        prompts=prompts,
        default_prompt=default,
        max_tokens=_longest(folder, transformer["max_seq_length"]),
        lowercases=transformer["do_lower_case"].flag(False),
        messages=_messages(transformer),
        source=_MODULES,
    )


def _modules(folder: pathlib.Path) -> list[_Module]:
    path = folder / _MODULES
    try:
        return msgspec.json.decode(read_text(folder, _MODULES, MOST_JSON_BYTES), type=list[_Module])
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not a list of sentence-transformers' modules: {error}; {COPY_AGAIN}") from error


def _class_of(module: _Module) -> str:
    """Returns the class of a module of sentence-transformers, whose package moved it between its versions; the whole
    name of a class of another package.
    """
    package, _, name = module.type.rpartition(".")
    return name if package.partition(".")[0] == "sentence_transformers" else module.type


def _transformer(folder: pathlib.Path, task: str) -> RawConfig:
    """Returns the configuration of the transformer module, which is checked."""
    name = next((name for name in _TRANSFORMER_CONFIGS if find_file(folder, name) is not None), None)
    if name is None:
        return RawConfig({}, str(folder / _TRANSFORMER_CONFIGS[0]))
    raw = _read(folder, name)
    _check_keys(raw, _TRANSFORMER_KEYS)
    raw["transformer_task"].one_of(task, default=task)
    for key in ("query_length", "document_length", "query_expansion"):
        if raw[key].value:
            raise raw[key].refused("left out")
    for key in ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"):
        if raw[key].value:
            raise raw[key].refused("empty")
    return raw


def _messages(transformer: RawConfig) -> PromptMessages | None:
    """Returns how texts become messages, if the transformer module reads messages; otherwise it reads texts."""
    modalities = transformer["modality_config"].object()
    processing = transformer["processing_kwargs"].object()
    if _MESSAGE not in modalities:
        if len(modalities):
            modalities["text"].object()["method"].one_of("forward")
        for key in processing:
            raise processing[key].refused("left out")
        return None
    message = modalities[_MESSAGE].object()
    message["method"].one_of("forward")
    for key in processing:
        if key != _TEMPLATE_VARIABLES:
            raise processing[key].refused("left out")
    variables = processing[_TEMPLATE_VARIABLES].object()
    for key in variables:
        if key in _ABOUT_TOKENS or not isinstance(variables[key].value, bool | int | float | str):
            raise variables[key].refused("left out")
    variables[_RESTORES_END].only(True)
    return PromptMessages(
        variables={key: variables[key].value for key in variables if key != _RESTORES_END},
        has_parts=message["format"].one_of("flat", "structured") == "structured",
    )


def _pooling(folder: pathlib.Path, path: str) -> tuple[tuple[PoolingMode, ...], bool]:
    raw = _read(folder, f"{path}/config.json")
    _check_keys(raw, _POOLING_KEYS)
    known = get_args(PoolingMode)
    given = raw["pooling_mode"]
    if given.value is None:
        modes = tuple(mode for key, mode in _LEGACY_MODES.items() if raw[key].flag(False)) or ("mean",)
    elif isinstance(given.value, list):
        modes = tuple(cast(PoolingMode, item.one_of(*known)) for item in given.items())
    else:
        modes = (cast(PoolingMode, given.one_of(*known)),)
    return modes, raw["include_prompt"].flag(True)


def _dense(folder: pathlib.Path, path: str) -> DenseLayer:
    raw = _read(folder, f"{path}/config.json")
    _check_keys(raw, _DENSE_KEYS)
    raw["module_input_name"].one_of(_POOLED, default=_POOLED)
    raw["module_output_name"].one_of(_POOLED, default=_POOLED)
    raw["use_residual"].only(False)
    name = raw["activation_function"].one_of(*_ACTIVATIONS, default="torch.nn.modules.activation.Tanh")
    return DenseLayer(
        path,
        raw["in_features"].whole(),
        raw["out_features"].whole(),
        raw["bias"].flag(True),
        _ACTIVATIONS[name],
    )


def _prompts(folder: pathlib.Path) -> tuple[dict[str, str], str | None]:
    """Returns the named prompts, and the name of the one that texts get by default."""
    name = "config_sentence_transformers.json"
    if find_file(folder, name) is None:
        return {}, None
    raw = _read(folder, name)
    given = raw["prompts"].object()
    prompts = {key: given[key].text("") for key in given}
    default = raw["default_prompt_name"]
    return prompts, None if default.value is None else default.one_of(*prompts)


# ---- models that score by the logits of two tokens -------------------------------------------------------------------


def _scorer(folder: pathlib.Path, raw: RawConfig, modules: list[_Module]) -> PoolingInfo:
    """Reads a cross-encoder of sentence-transformers whose score is a token's logit, or the difference of two."""
    names = [_class_of(module) for module in modules]
    if names != ["Transformer", _LOGIT_SCORE] or modules[0].path:
        raise ModelError(f"{folder / _MODULES} must hold one Transformer and one {_LOGIT_SCORE}, not {names}")
    transformer = _transformer(folder, "text-generation")
    messages = _messages(transformer)
    if messages is None:
        raise transformer["modality_config"].refused(f"an object with {_MESSAGE}, because a prompt holds both texts")
    score = _read(folder, f"{modules[1].path}/config.json")
    _check_keys(score, _LOGIT_SCORE_KEYS)
    passed_on = transformer["module_output_name"].text(_LOGITS)
    score["module_input_name"].one_of(passed_on, default=_LOGITS)
    fit, misfit = score["true_token_id"].whole(least=0), score["false_token_id"]
    answers = (fit,) if misfit.value is None else (fit, misfit.whole(least=0))
    activation = "sigmoid" if len(answers) == 2 else _classifier_activation(folder, raw, 1)
    return _scoring(folder, answers, messages, activation, _MODULES)


def _by_answers(folder: pathlib.Path, raw: RawConfig, source: str) -> PoolingInfo:
    """Describes a model that says whether two texts fit where its answer begins, under its family's prompt if that is
    known, else under its chat template.
    """
    template = PROMPTS.get(raw["model_type"].text(""), "")
    messages = PromptMessages(template=template, variables={"add_generation_prompt": True})
    return _scoring(folder, answer_ids(folder), messages, "sigmoid", source)


def _scoring(
    folder: pathlib.Path, answers: tuple[int, ...], messages: PromptMessages, activation: Activation, source: str
) -> PoolingInfo:
    prompts, default = _prompts(folder)
    return PoolingInfo(
        task="classify",
        activation=activation,
        labels=("LABEL_0",),
        dimension=1,
        prompts=prompts,
        default_prompt=default,
        max_tokens=_longest(folder, None),
        messages=messages,
        answer_tokens=answers,
        source=source,
    )


# ---- classifiers -----------------------------------------------------------------------------------------------------


def _classifier(folder: pathlib.Path, raw: RawConfig) -> PoolingInfo:
    labels = _labels(raw)
    prompts, default = _prompts(folder)
    return PoolingInfo(
        task="classify",
        activation=_classifier_activation(folder, raw, len(labels)),
        labels=labels,
        dimension=len(labels),
        prompts=prompts,
        default_prompt=default,
        max_tokens=_longest(folder, None),
        messages=_classifier_messages(folder),
        source=f"{raw.architecture}",
    )


def _classifier_messages(folder: pathlib.Path) -> PromptMessages | None:
    """Returns how the texts of a classifier become messages; None if it has no modules, or reads texts."""
    if find_file(folder, _MODULES) is None:
        return None
    modules = _modules(folder)
    if [_class_of(module) for module in modules] != ["Transformer"] or modules[0].path:
        names = [module.type for module in modules]
        raise ModelError(f"{folder / _MODULES} must hold one Transformer for a classifier, not {names}")
    return _messages(_transformer(folder, "sequence-classification"))


def _labels(raw: RawConfig) -> tuple[str, ...]:
    """Returns the names of the labels in order; transformers' default is two."""
    given = raw["id2label"].object()
    if not len(given):
        return tuple(f"LABEL_{index}" for index in range(raw["num_labels"].whole(2)))
    return tuple(given[str(index)].text() for index in range(len(given)))


def _classifier_activation(folder: pathlib.Path, raw: RawConfig, num_labels: int) -> Activation:
    """Returns the activation that sentence-transformers' cross-encoders name, wherever their versions wrote it.
    Otherwise one number becomes a probability, and several become probabilities of which one label is true, or, in a
    model of several true labels, each is true.
    """
    saved = "config_sentence_transformers.json"
    named = [raw["sentence_transformers"].object()["activation_fn"], raw["sbert_ce_default_activation_function"]]
    if find_file(folder, saved) is not None:
        named.append(_read(folder, saved)["activation_fn"])
    for value in named:
        if value.value is not None and num_labels == 1:
            return _ACTIVATIONS[value.one_of(*_ACTIVATIONS)]
    is_multiple = raw["problem_type"].text("") == "multi_label_classification"
    return "sigmoid" if num_labels == 1 or is_multiple else "softmax"


# ---- common ----------------------------------------------------------------------------------------------------------


def _read(folder: pathlib.Path, name: str) -> RawConfig:
    return RawConfig(read_json(folder, name), str(folder / name))


def _check_keys(raw: RawConfig, known: set[str]) -> None:
    for key in raw:
        if key not in known:
            raise raw[key].refused("left out, for it is not known")


def _hidden_size(raw: RawConfig) -> int:
    return raw.first_of("hidden_size", "dim", "d_model", "n_embd").whole()


def _longest(folder: pathlib.Path, named: RawValue | None) -> int | None:
    """Returns the longest text in tokens: the transformer module's, else the tokenizer's; None if neither says."""
    if named is not None and named.value is not None:
        return named.whole()
    if find_file(folder, "tokenizer_config.json") is None:
        return None
    longest: Any = read_json(folder, "tokenizer_config.json").get("model_max_length")
    return int(longest) if isinstance(longest, int | float) and 0 < longest < _UNLIMITED_TOKENS else None
