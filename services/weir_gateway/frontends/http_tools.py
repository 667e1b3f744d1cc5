"""What tools ask for beside answers of a model: tokens, one model, the version, the load. In vLLM's and OpenAI's forms.

POST /tokenize, /detokenize    vLLM's
GET /v1/models, /v1/models/ID  OpenAI's, with vLLM's max_model_len
GET /version, /load            vLLM's
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import weir
from weir_gateway.access import Caller
from weir_gateway.frontends.http_app import CallerRoute
from weir_gateway.frontends.http_body import BodyReader
from weir_gateway.frontends.openai.schema import parse_body
from weir_gateway.frontends.tools_schema import (
    DetokenizeBody,
    TokenizeBody,
    detokenize_answer,
    detokenize_request,
    tokenize_answer,
    tokenize_request,
)
from weir_gateway.input_processor import InputProcessor
from weir_gateway.requests.models import ServedModel
from weir_gateway.tokenization import TokenizeRequest

_JSON = "application/json"


class HttpTools:
    """Handlers for callers that are known. They raise WeirError, and BadBody."""

    def __init__(self, processor: InputProcessor, bodies: BodyReader) -> None:
        self._processor = processor
        self._bodies = bodies

    def routes(self) -> Sequence[CallerRoute]:
        return (
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/version", self.version),
            ("GET", "/load", self.load),
        )

    async def version(self, request: Request, caller: Caller) -> Response:
        del request, caller
        return JSONResponse({"version": weir.__version__})

    async def load(self, request: Request, caller: Caller) -> Response:
        del request, caller
        return JSONResponse({"server_load": self._processor.num_open})

    async def models(self, request: Request, caller: Caller) -> Response:
        del request, caller
        data = [
            _model_json(model, name)
            for model in self._processor.models.list_models()
            for name in (model.name, *model.aliases)
        ]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["model"]
        if not name:  # /v1/models/
            return await self.models(request, caller)
        return JSONResponse(_model_json(self._processor.models.find(name, "model"), name))

    async def tokenize(self, request: Request, caller: Caller) -> Response:
        tokenization = self._processor.tokenization
        tokenization.check_room(caller)

        def parse(raw: bytes) -> tuple[TokenizeRequest, bool]:
            body = parse_body(TokenizeBody, raw)
            return tokenize_request(body), bool(body.return_token_strs)

        asked, with_strings = await self._bodies.read(request, caller, parse)
        content = await tokenization.tokenize(asked, caller, partial(tokenize_answer, with_strings=with_strings))
        return Response(content, media_type=_JSON)

    async def detokenize(self, request: Request, caller: Caller) -> Response:
        tokenization = self._processor.tokenization
        tokenization.check_room(caller)
        asked = await self._bodies.read(
            request, caller, lambda raw: detokenize_request(parse_body(DetokenizeBody, raw))
        )
        content = await tokenization.detokenize(asked, caller, detokenize_answer)
        return Response(content, media_type=_JSON)


def _model_json(model: ServedModel, name: str) -> dict[str, Any]:
    """`name`: the model's, or an alias."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "weir",
        "root": model.name,
        "parent": None,
        "permission": [],
        "max_model_len": model.max_context_tokens,
    }
