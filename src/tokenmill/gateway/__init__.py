"""HTTP: routes, schemas, streams. Speaks `core.messages` to an engine process and loads no native code itself."""
