"""A certificate for 127.0.0.1 and the authority that vouches for it, as files."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificate:
    """Paths of PEM files."""

    certfile: str
    keyfile: str
    authority: str


def certificate_in(folder: Path) -> Certificate:
    """Make one."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    files = Certificate(*(str(folder / name) for name in ("cert.pem", "key.pem", "authority.pem")))
    issued.cert_chain_pems[0].write_to_path(files.certfile)
    issued.private_key_pem.write_to_path(files.keyfile)
    authority.cert_pem.write_to_path(files.authority)
    return files
