"""The OpenAPI document. Routes read bodies themselves, after login and within limits, so FastAPI
does not know the bodies' schemas. This module adds them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from trainwright.tasks.service.answer_models import ErrorAnswer
from trainwright.tasks.service.requests import (
    EstimateRequest,
    PlanRequest,
    RecommendRequest,
    StructureRequest,
)

_BODIES: tuple[type[BaseModel], ...] = (
    PlanRequest,
    EstimateRequest,
    StructureRequest,
    RecommendRequest,
)
_IN_COMPONENTS = "#/components/schemas/{model}"
_MORE = {
    408: "the body did not arrive in time",
    413: "the body is too large",
    429: "too many requests: try again",
    503: "a needed service does not answer",
}


def body(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a route's body and its errors."""
    content = {
        "application/json": {"schema": {"$ref": _IN_COMPONENTS.format(model=model.__name__)}}
    }
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": {
            status: {"model": ErrorAnswer, "description": text} for status, text in _MORE.items()
        },
    }


def openapi(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in _BODIES:
            made = model.model_json_schema(mode="validation", ref_template=_IN_COMPONENTS)
            for name, definition in made.pop("$defs", {}).items():
                schemas.setdefault(name, definition)
            schemas[model.__name__] = made
        app.openapi_schema = document
    return app.openapi_schema
