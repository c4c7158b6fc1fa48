"""`tokenmill workers`"""

from __future__ import annotations

COMMANDS = {
    "list": "List the workers of a server.",
    "migrate": "Have others go on with what a worker decodes.",
    "remove": "End a worker for good; what it has goes elsewhere.",
}
