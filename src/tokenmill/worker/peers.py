"""From a worker's settings to how it opens its door and reaches those of others."""

from __future__ import annotations

import ssl

from tokenmill.core.config import KVTransferConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.proof import read_secret
from tokenmill.transfer.connector import Options


def connector_options(config: KVTransferConfig) -> Options:
    """Reads the files that the settings name. Raises `ConfigError` if one cannot be read, or is not what it should be."""
    if config.connector == "shm":
        return Options()
    assert config.secret_file is not None, "settings of tcp and nixl name one"
    secret = read_secret(config.secret_file)
    door, reader = _tls(config)
    options = Options(host=config.host, port=config.port, advertise=config.advertise, secret=secret, door_tls=door, reader_tls=reader)
    options.require_secret()
    return options


def _tls(config: KVTransferConfig) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """A door shows its certificate; who reads is known by the secret."""
    if config.tls_cert is None or config.tls_key is None:
        return None, None
    door = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        door.load_cert_chain(config.tls_cert, config.tls_key, password="")  # never asked for at a terminal
    except OSError as error:
        what = f"tls_cert {config.tls_cert} with tls_key {config.tls_key}"
        raise ConfigError(f"{what} cannot be used: {error.strerror or error}", param="tls_cert") from None
    try:
        return door, ssl.create_default_context(cafile=config.tls_ca)
    except OSError as error:
        raise ConfigError(f"tls_ca {config.tls_ca} cannot be used: {error.strerror or error}", param="tls_ca") from None
