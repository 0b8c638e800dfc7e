import shutil
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import BadDataError, ProtocolMismatchError
from protocol.trust.identity import Identity
from protocol.trust.pki import (
    Authority,
    Principal,
    Role,
    enrolment_statement,
    has_issued,
    is_key_of,
    joining_name,
    joining_name_in,
    make_request,
    name_in,
    new_swarm_id,
    pin_of,
    principal_of,
    server_name,
)

NOW = datetime(2026, 11, 1, tzinfo=UTC)
SWARM = new_swarm_id()
AUTHORITY = Authority.create(SWARM)
NODE_ID = Identity.generate().node_id


def signed_by(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, **names: str) -> bytes:
    """A request, DER, that asks for a name nobody should get."""
    algorithm = None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256()
    wish = x509.SubjectAlternativeName(
        [x509.UniformResourceIdentifier(f"atoll://{SWARM}/operator")]
    )
    return (
        x509.CertificateSigningRequestBuilder(subject_name=x509.Name([]))
        .add_extension(wish, critical=False)
        .sign(key, algorithm)
        .public_bytes(serialization.Encoding.DER)
    )


def with_uris(*uris: str) -> bytes:
    """A self-signed certificate, PEM, that names just these."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder(subject_name=x509.Name([]), issuer_name=x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
    )
    if uris:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_every_certificate_speaks_for_its_role_in_its_swarm() -> None:
    request = make_request()
    node = AUTHORITY.issue_node(request.request_der, NODE_ID)
    server, operator = AUTHORITY.issue_server(), AUTHORITY.issue_operator()
    assert principal_of(node) == Principal(swarm_id=SWARM, role=Role.NODE, node_id=NODE_ID)
    assert principal_of(operator.certificate_pem) == Principal(swarm_id=SWARM, role=Role.OPERATOR)
    assert principal_of(server.certificate_pem).role is Role.COORDINATOR
    assert name_in(server.certificate_pem) == server_name(SWARM)
    assert joining_name_in(server.certificate_pem) == joining_name(SWARM) != server_name(SWARM)
    for certificate, key in ((node, request.key_pem), server, operator):
        assert has_issued(AUTHORITY.certificate_pem, certificate)
        assert is_key_of(key, certificate)
        assert not has_issued(Authority.create(SWARM).certificate_pem, certificate)
        assert not is_key_of(make_request().key_pem, certificate)


def test_no_certificate_depends_on_the_time_at_which_it_was_made() -> None:
    authority = x509.load_pem_x509_certificate(AUTHORITY.certificate_pem)
    leaf = x509.load_pem_x509_certificate(AUTHORITY.issue_server().certificate_pem)
    for certificate in (authority, leaf):
        assert certificate.not_valid_before_utc == datetime(1970, 1, 1, tzinfo=UTC)
        assert certificate.not_valid_after_utc == datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert constraints.ca
    assert constraints.path_length == 0


@pytest.mark.parametrize("year", [1970, 1999, 2026, 2038, 2060, 9999])
def test_whatever_year_a_machine_believes_in_it_accepts_a_certificate(
    tmp_path: Path, year: int
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to ask at another time than now")
    request = make_request()
    (tmp_path / "ca").write_bytes(AUTHORITY.certificate_pem)
    for purpose, certificate in (
        ("sslserver", AUTHORITY.issue_server().certificate_pem),
        ("sslclient", AUTHORITY.issue_node(request.request_der, NODE_ID)),
    ):
        (tmp_path / "leaf").write_bytes(certificate)
        seconds = int(datetime(year, 6, 1, tzinfo=UTC).timestamp())
        checked = subprocess.run(
            [
                "openssl",
                "verify",
                "-attime",
                str(seconds),
                "-purpose",
                purpose,
                "-CAfile",
                "ca",
                "leaf",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, checked.stderr


def test_a_leaf_cannot_serve_as_the_other_side() -> None:
    usages = {
        role: x509.load_pem_x509_certificate(issued.certificate_pem)
        .extensions.get_extension_for_class(x509.ExtendedKeyUsage)
        .value
        for role, issued in (
            ("server", AUTHORITY.issue_server()),
            ("operator", AUTHORITY.issue_operator()),
        )
    }
    assert list(usages["server"]) == [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]
    assert list(usages["operator"]) == [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]


def test_only_the_key_is_taken_from_a_request() -> None:
    request = signed_by(ec.generate_private_key(ec.SECP256R1()))
    certificate = AUTHORITY.issue_node(request, NODE_ID)
    assert principal_of(certificate).role is Role.NODE


def test_a_request_must_be_signed_by_its_own_p256_key() -> None:
    good = make_request().request_der
    forged = good[:-1] + bytes([good[-1] ^ 1])
    for request, complaint in (
        (forged, "not signed by its own key|not a certificate request"),
        (signed_by(Ed25519PrivateKey.generate()), "not P-256"),
        (signed_by(ec.generate_private_key(ec.SECP384R1())), "not P-256"),
        (b"nonsense", "not a certificate request"),
        (good.replace(b"\x02\x01\x00", b"\x02\x01\x07", 1), "7 is not a valid CSR version"),
    ):
        with pytest.raises(BadDataError, match=complaint):
            AUTHORITY.issue_node(request, NODE_ID)


@pytest.mark.parametrize(
    "uris",
    [
        (),
        (f"atoll://{SWARM}/operator", f"atoll://{SWARM}/operator"),
        (f"atoll://{SWARM}/node",),
        (f"atoll://{SWARM}/operator/{NODE_ID}",),
        (f"atoll://{SWARM}/node/{NODE_ID}/operator",),
        (f"atoll://{SWARM}/node/{NODE_ID.upper()}x",),
        (f"https://{SWARM}/operator",),
        (f"atoll://{SWARM}/operator\n",),
    ],
)
def test_a_certificate_that_does_not_name_one_member_is_refused(uris: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolMismatchError):
        principal_of(with_uris(*uris))


def test_a_pin_is_the_hash_that_tls_tools_show() -> None:
    certificate = AUTHORITY.issue_server().certificate_pem
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    digest = hashes.Hash(hashes.SHA256())
    digest.update(der)
    assert pin_of(certificate) == digest.finalize()
    with pytest.raises(ProtocolMismatchError, match="not a certificate"):
        pin_of(b"nonsense")


def test_an_enrolment_statement_binds_invite_and_request() -> None:
    golden = b"atoll/1 enrolment\0\0\0\0\x02ab" + bytes.fromhex(
        "1f58b9145b24d108d7ac38887338b3ea3229833b9c1e418250343f907bfd1047"
    )
    assert enrolment_statement("ab", b"request") == golden
    assert enrolment_statement("a", b"request") != enrolment_statement("a", b"another")
