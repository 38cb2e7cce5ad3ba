"""A certificate for localhost that only these tests trust, and contexts for both sides."""

from __future__ import annotations

import ssl
import tempfile

_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgqJaFix+vfLw6omqu
7JzcSBVAv5Fs3m8R1z60/2zzXoShRANCAARqU/OweCIi77/k6srIouGNEHHguVmc
ma5YlSZLvwJZ5J33jiJ/L0ch6Je+hdCz/pY5tN16W3jfkkmya+RdxWeW
-----END PRIVATE KEY-----
"""
_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBgjCCASegAwIBAgIBATAKBggqhkjOPQQDAjAZMRcwFQYDVQQDDA5tb2RlbHBv
b2wgdGVzdDAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowGTEXMBUG
A1UEAwwObW9kZWxwb29sIHRlc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARq
U/OweCIi77/k6srIouGNEHHguVmcma5YlSZLvwJZ5J33jiJ/L0ch6Je+hdCz/pY5
tN16W3jfkkmya+RdxWeWo14wXDAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEw
DwYDVR0TAQH/BAUwAwEB/zAOBgNVHQ8BAf8EBAMCAoQwHQYDVR0OBBYEFAa9e7fq
BA2Aj+51ElmTMIcSdA7pMAoGCCqGSM49BAMCA0kAMEYCIQDmz0TnEbgkMiZQCiu3
xbI0ZPM62q2niQ0pRo3AFc3sAQIhAPG1grdGbeCAZwv33yKRlkhCAv0gVAeoE6Td
4+uQCK1p
-----END CERTIFICATE-----
"""


def server_context() -> ssl.SSLContext:
    """Context of a server that shows the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as pair:
        pair.write(_KEY + _CERTIFICATE)
        pair.flush()
        context.load_cert_chain(pair.name)
    return context


def certificate() -> str:
    """Return the certificate as PEM, for a file of authorities."""
    return _CERTIFICATE


def client_context() -> ssl.SSLContext:
    """Context of a client that trusts it, and checks the name."""
    return ssl.create_default_context(cadata=_CERTIFICATE)
