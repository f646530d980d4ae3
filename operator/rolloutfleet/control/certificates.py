"""The webhook's serving certificate: issued and renewed by the operator, kept in a Secret, trusted by the API server.

Where cert-manager provides a certificate it is mounted as a folder instead, and cert-manager writes the caBundle.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=365)
RENEW_WHEN_LEFT = LIFETIME / 3
CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class Certificate:
    """PEM texts."""

    authority: bytes
    """Whom clients trust: the one that signed it, and the one before."""
    certificate: bytes
    key: bytes

    @property
    def secret_data(self) -> dict[str, str]:
        texts = {"ca.crt": self.authority, "tls.crt": self.certificate, "tls.key": self.key}
        return {name: base64.b64encode(text).decode() for name, text in texts.items()}

    @staticmethod
    def from_secret(secret: Mapping[str, Any]) -> Certificate | None:
        data = secret.get("data") or {}
        try:
            return Certificate(
                authority=base64.b64decode(data["ca.crt"]),
                certificate=base64.b64decode(data["tls.crt"]),
                key=base64.b64decode(data["tls.key"]),
            )
        except (KeyError, ValueError):
            return None


def service_names(service: str, namespace: str) -> list[str]:
    return [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local", f"{service}.{namespace}"]


def renewal_due(certificate: Certificate | None, names: Sequence[str], now: datetime) -> bool:
    """True if there is none, it is unreadable, its key is another's, it names something else or soon runs out."""
    if certificate is None:
        return True
    try:
        parsed = x509.load_pem_x509_certificate(certificate.certificate)
        extension = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        key = serialization.load_pem_private_key(certificate.key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        return True
    # Unlike what is unreadable, a pair that does not fit would fail at every load and never mend itself.
    if _key_bytes(key.public_key()) != _key_bytes(parsed.public_key()):
        return True
    covered = set(extension.value.get_values_for_type(x509.DNSName))
    return not set(names) <= covered or parsed.not_valid_after_utc - now < RENEW_WHEN_LEFT


def _key_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def issue(names: Sequence[str], now: datetime, *, trusted: bytes = b"") -> Certificate:
    """A certificate for these DNS names, signed by an authority whose key is forgotten at once.

    `trusted`: authorities of the certificate that it replaces. The newest stays trusted: other replicas serve with that
    certificate until they have read this one.
    """
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rolloutfleet webhook authority")])
    authority = (
        _builder(authority_name, authority_name, authority_key, now, signer=authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    certificate = (
        _builder(subject, authority_name, key, now, signer=authority_key)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Certificate(
        authority=authority.public_bytes(serialization.Encoding.PEM) + _newest(trusted),
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _newest(authorities: bytes) -> bytes:
    try:
        found = x509.load_pem_x509_certificates(authorities)
    except ValueError:
        return b""
    return found[0].public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    *,
    signer: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        # RFC 5280 demands both; strict clients (Python 3.13's default) refuse a chain without.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
