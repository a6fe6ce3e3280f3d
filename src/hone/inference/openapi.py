"""OpenAPI description at `GET /openapi.json`, including routes that parse bodies without FastAPI."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from hone.inference.openai.generate import GenerateTokensRequest
from hone.inference.openai.responses import ResponsesRequest
from hone.inference.openai.schema import ChatRequest, CompletionRequest, TokensRequest
from hone.inference.served_model import Served

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/tokens": TokensRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/inference/v1/generate": GenerateTokensRequest,
}
CODES = {
    "400": "The request is refused; the message says why.",
    "401": "The API key is wrong or missing.",
    "403": "Control routes answer to this machine alone, unless the server has an API key.",
    "404": "There is no such model here.",
    "413": "The body is larger than any request could be.",
}


def install_description(app: FastAPI, served: Served) -> None:
    app.openapi = lambda: _build_description(app, served.model_names)  # type: ignore[method-assign]


def _build_description(app: FastAPI, names: list[str]) -> dict[str, Any]:
    said = get_openapi(title=app.title, version="1", routes=app.routes)
    schemas = said.setdefault("components", {}).setdefault("schemas", {})
    for path, kind in BODIES.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schema["properties"]["model"]["enum"] = names
        schemas[kind.__name__] = schema
        content = {
            "application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        }
        kinds = [
            "application/json",
            *(["text/event-stream"] if "stream" in schema["properties"] else []),
        ]
        said["paths"][path] = {
            "post": {
                "summary": kind.__doc__ or path,
                "requestBody": {"required": True, "content": content},
                "responses": {
                    "200": {
                        "description": "The answer.",
                        "content": {one: {"schema": {}} for one in kinds},
                    }
                },
            }
        }
    for operations in said["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # invalid requests are answered with 400
            operation["responses"] |= {
                code: {"description": words} for code, words in CODES.items()
            }
    return said
