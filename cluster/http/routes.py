"""Every endpoint, one row each. Routing, decoding, keys, the request log and the OpenAPI document follow this table.

A new endpoint is a row here and a file in `cluster/http/endpoints/` with its handler and its bodies.
"""

from __future__ import annotations

from cluster.batch.records import Batch, FileObject
from cluster.http.endpoints import anthropic, batches, files, generation, models, ollama, pages, status, tokens
from cluster.http.exchange.routing import Route
from cluster.http.exchange.uploads import UploadForm
from cluster.protocol.anthropic import CountTokensRequest, MessageAnswer, MessagesRequest, TokenCount
from cluster.protocol.ollama import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaModels,
    OllamaShow,
    OllamaShowRequest,
)
from cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from cluster.protocol.responses import ChatCompletion, Completion

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
HTML = "text/html"
BINARY = "application/octet-stream"
GENERATION_ERRORS = (404, 408, 429, 503)

ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        generation.chat,
        "Chat completion",
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        media_type=EVENTS,
        errors=GENERATION_ERRORS,
        logged=True,
    ),
    Route(
        "POST",
        "/v1/completions",
        generation.completions,
        "Completion",
        body=CompletionRequest,
        answer=Completion,
        media_type=EVENTS,
        errors=GENERATION_ERRORS,
        logged=True,
    ),
    Route(
        "POST",
        "/v1/messages",
        anthropic.messages,
        "Chat in Anthropic's shape",
        body=MessagesRequest,
        answer=MessageAnswer,
        media_type=EVENTS,
        errors=GENERATION_ERRORS,
        error_body=anthropic.error_body,
        logged=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        "The prompt's tokens of such a chat",
        body=CountTokensRequest,
        answer=TokenCount,
        errors=(404,),
        error_body=anthropic.error_body,
    ),
    Route("GET", "/v1/models", models.list_models, "The models served", answer=models.ModelList),
    Route("GET", "/v1/models/{model}", models.one_model, "One model", answer=models.ModelCard, errors=(404,)),
    Route(
        "POST",
        "/tokenize",
        tokens.tokenize,
        "Text or messages to token ids",
        body=tokens.TokenizeRequest,
        answer=tokens.TokenizeResponse,
        errors=(404,),
    ),
    Route(
        "POST",
        "/detokenize",
        tokens.detokenize,
        "Token ids to text",
        body=tokens.DetokenizeRequest,
        answer=tokens.DetokenizeResponse,
        errors=(404,),
    ),
    Route(
        "POST",
        "/api/chat",
        ollama.chat,
        "Chat in Ollama's shape",
        body=OllamaChatRequest,
        answer=OllamaChatAnswer,
        media_type=LINES,
        errors=GENERATION_ERRORS,
        logged=True,
    ),
    Route(
        "POST",
        "/api/generate",
        ollama.generate,
        "Completion in Ollama's shape",
        body=OllamaGenerateRequest,
        answer=OllamaGenerateAnswer,
        media_type=LINES,
        errors=GENERATION_ERRORS,
        logged=True,
    ),
    Route("GET", "/api/tags", ollama.tags, "The models served, in Ollama's shape", answer=OllamaModels),
    Route(
        "POST",
        "/api/show",
        ollama.show,
        "A model, in Ollama's shape",
        body=OllamaShowRequest,
        answer=OllamaShow,
        errors=(404,),
    ),
    Route("GET", "/api/version", status.server_version, "As /version", answer=status.Version, public=True),
    Route(
        "POST",
        "/v1/files",
        files.upload,
        "Upload a batch's input",
        form=UploadForm,
        answer=FileObject,
        errors=(404,),
        logged=True,
    ),
    Route(
        "GET",
        "/v1/files",
        files.list_files,
        "The client's files",
        query=files.FileQuery,
        answer=files.FileList,
        errors=(404,),
    ),
    Route("GET", "/v1/files/{file_id}", files.one_file, "One file", answer=FileObject, errors=(404,)),
    Route("DELETE", "/v1/files/{file_id}", files.delete_file, "Delete it", answer=files.FileDeleted, errors=(404,)),
    Route(
        "GET",
        "/v1/files/{file_id}/content",
        files.content,
        "Its content",
        media_type=BINARY,
        errors=(404,),
        logged=True,
    ),
    Route(
        "POST",
        "/v1/batches",
        batches.create,
        "Answer a file of requests",
        body=batches.CreateBatchRequest,
        answer=Batch,
        errors=(404,),
        logged=True,
    ),
    Route(
        "GET",
        "/v1/batches",
        batches.list_batches,
        "The client's batches",
        query=batches.BatchQuery,
        answer=batches.BatchList,
        errors=(404,),
    ),
    Route("GET", "/v1/batches/{batch_id}", batches.one_batch, "One batch", answer=Batch, errors=(404,)),
    Route("POST", "/v1/batches/{batch_id}/cancel", batches.cancel, "Cancel it", answer=Batch, errors=(404, 409)),
    Route(
        "GET",
        "/health",
        status.health,
        "200 while the engine is idle or stepping; status is ok, or degraded with a reason",
        answer=status.Health,
        errors=(503,),
        public=True,
    ),
    Route("GET", "/ping", status.health, "As /health", answer=status.Health, errors=(503,), public=True),
    Route(
        "GET",
        "/-/healthz",
        status.ready,
        "200 while requests should be sent here: what Ray Serve's proxies answer",
        media_type="text/plain",
        errors=(503,),
        public=True,
    ),
    Route("GET", "/status", status.status, "Engines, deployments and nodes", answer=status.Status, public=True),
    Route("GET", "/version", status.server_version, "Manta's version", answer=status.Version, public=True),
    Route("GET", "/metrics", status.metrics, "Prometheus metrics", media_type="text/plain", errors=(503,), public=True),
    Route("GET", "/openapi.json", status.openapi, "This document", answer=dict, public=True),
    Route("GET", "/", pages.home, "What is served here", answer=pages.Home, media_type=HTML, public=True),
    Route("GET", "/docs", pages.docs, "The endpoints and their fields, to read", media_type=HTML, public=True),
)
