"""The ASGI application: routes, and the middleware around them from the outside in."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from services.gateway.api import chat, completions, describe, messages, models, ops, responses, tokenize
from services.gateway.api.direct import Direct
from services.gateway.api.endpoint import endpoint
from services.gateway.api.errors import http_exception
from services.gateway.api.guards import ApiKeys, BodyLimit, Drain
from services.gateway.api.headers import SecurityHeaders
from services.gateway.api.observe import Observe
from services.gateway.api.shortcut import Shortcut
from services.gateway.gateway import Gateway


def routes() -> list[Route]:
    """Every path and what answers it."""
    return [
        Route("/v1/chat/completions", endpoint(chat.chat), methods=["POST"]),
        Route("/v1/completions", endpoint(completions.completions), methods=["POST"]),
        Route("/v1/responses", endpoint(responses.responses), methods=["POST"]),
        Route("/v1/messages", endpoint(messages.messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", endpoint(messages.count_tokens), methods=["POST"]),
        Route("/tokenize", endpoint(tokenize.tokenize), methods=["POST"]),
        Route("/detokenize", endpoint(tokenize.detokenize), methods=["POST"]),
        Route("/v1/models", endpoint(models.models)),
        Route("/v1/models/{model:path}", endpoint(models.model)),
        Route("/health", endpoint(ops.health)),
        Route("/ready", endpoint(ops.ready)),
        Route("/metrics", endpoint(ops.metrics)),
        Route("/debug/state", endpoint(ops.debug_state)),
        Route("/openapi.json", endpoint(describe.openapi)),
        Route("/docs", endpoint(describe.docs)),
    ]


def create_app(gateway: Gateway) -> ASGIApp:
    """Everything that HTTP reaches. CORS is around what refuses: refusals have its headers, preflights need no key."""
    paths = routes()
    starlette = Starlette(routes=paths, exception_handlers={HTTPException: http_exception})
    starlette.state.gateway = gateway
    options = gateway.options
    app: ASGIApp = BodyLimit(Shortcut(starlette, paths))
    if options.api_keys:
        app = ApiKeys(app, options.api_keys)
    app = Drain(app, lambda: gateway.draining)
    app = Observe(app, gateway.metrics, gateway.tracing)
    if options.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return Direct(SecurityHeaders(app))
