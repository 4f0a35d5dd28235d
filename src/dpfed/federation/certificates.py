"""The dates between which certificate files are valid. An expired certificate is refused."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from dpfed.errors import DpfedError, counted
from dpfed.federation.keys import AUTHORITY, SERVER

# If a certificate is valid for fewer days than this, the user is advised to renew it.
SOON_DAYS = 30


@dataclass(frozen=True)
class Validity:
    """The time from `start` to `end` in which a certificate file is valid."""

    path: Path
    start: datetime
    end: datetime

    def days_left(self, now: datetime) -> int:
        return (self.end - now) // timedelta(days=1)

    def problem(self, now: datetime) -> str | None:
        """Return the reason why the certificate cannot be used now, or None."""
        if now > self.end:
            return f"{self.path} expired on {self.end:%Y-%m-%d}"
        if now < self.start:
            return f"{self.path} is valid from {self.start:%Y-%m-%d} on"
        return None

    def sentence(self, now: datetime) -> str:
        problem = self.problem(now)
        if problem is not None:
            return f"{problem}: make new keys with `dpfed keys`"
        left = self.days_left(now)
        soon = ": renew it soon" if left < SOON_DAYS else ""
        return f"{self.path} expires on {self.end:%Y-%m-%d}, in {counted(left, 'day')}{soon}"


def validity(path: Path) -> Validity:
    """Return the dates of a certificate file; raise DpfedError if it is not in PEM format."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise DpfedError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise DpfedError(f"{path} is not a certificate in PEM format") from None
    return Validity(path, certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def check_valid(path: Path) -> None:
    """Raise DpfedError if a certificate file has expired or is not valid yet."""
    found = validity(path)
    problem = found.problem(datetime.now(UTC))
    if problem is not None:
        raise DpfedError(
            f"{problem}: the server's staff makes new keys with `dpfed keys`; "
            "if it should be valid, check this machine's clock"
        )


def check_server(folder: Path) -> None:
    """Raise DpfedError if a certificate in a server's key folder is missing or has expired."""
    for name in (AUTHORITY, SERVER):
        path = folder / name
        if not path.is_file():
            raise DpfedError(f"{path} is not there: `dpfed keys {folder} --server HOST` makes it")
        check_valid(path)
