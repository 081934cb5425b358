"""GET /: a page to chat with the model. Its one script is named by its hash, so that nothing else can run in it."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response


def page() -> Response:
    """The page, read once."""
    html = files("nibblelm").joinpath("chat.html").read_bytes()
    (script,) = re.findall(rb"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "style-src": "'unsafe-inline'",
        "connect-src": "'self'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
    }
    headers = {"content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items())}
    headers |= {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache"}
    return Response(html, media_type="text/html", headers=headers)
