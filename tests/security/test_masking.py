"""What is a secret in text that others read, and what is none."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from hpcrun.masking import MASK, Masker, is_secret_name

S = "hunter2-Xk9vQ"
"""The secret in each form, unless the form has one of its own."""
HEX = "0123456789abcdef0123456789abcdef01234567"
B64 = "dXNlcjpodW50ZXIyLVhrOXZR"  # user:hunter2-Xk9vQ
LETTERS = "Ab1" * 12
FORMS: list[str | tuple[str, str]] = [
    f"password={S}", f"password: {S}", f"Password : {S}", f"PASSWORD={S}", f"passwd={S}",
    f"db_password = {S}",
    f"api_key={S}", f"api-key: {S}", f"apiKey: {S}", f"apikey={S}", f"APIKEY={S}", f"X-Api-Key: {S}",
    f"aws_secret_access_key = {S}", f"AWS_SECRET_ACCESS_KEY={S}", f"secretAccessKey: {S}",
    f"aws_session_token = {S}", f"client_secret={S}", f"client-secret: '{S}'", f"passphrase: {S}",
    f"export FOO_TOKEN={S}", f"declare -x FOO_TOKEN=\"{S}\"", f"setenv FOO_TOKEN {S}",
    f"set -gx FOO_TOKEN {S}",
    f"FOO_TOKEN={S} python train.py", f"env FOO_TOKEN={S} python", f"--env=FOO_TOKEN={S}",
    f"-e FOO_TOKEN={S}",
    f"--password {S}", f"--password={S}", f"--db-password '{S}'", f"--token {S}", f"--api-key \"{S}\"",
    f"['--password', '{S}']", f'["--token", "{S}"]', f"curl -u me:{S} https://h/",
    f"curl --user 'me:{S}' h",
    f"sshpass -p {S} ssh h", f"mysql -u me -p{S} db",
    f'{{"password": "{S}"}}', f'{{"password":"{S}","user":"me"}}', f"{{'api_key': '{S}'}}",
    json.dumps({"text": json.dumps({"password": S})}), f'\\"token\\": \\"{S}\\"', f"password => '{S}'",
    f'os.environ["DB_PASSWORD"] = "{S}"', f"Environment=\"DB_PASSWORD={S}\"", f"$env:API_TOKEN = '{S}'",
    f"<password>{S}</password>", f'{{"name": "DB_PASSWORD", "value": "{S}"}}',
    f"- name: API_TOKEN\n  value: {S}",
    f"https://me:{S}@host/path", f"postgresql://me:{S}@db:5432/x", f"redis://:{S}@h",
    f"mongodb+srv://u:{S}@c",
    f"https://{S.replace('-', '')}0123456@github.com/x.git",
    f"https://h/x?access_token={S}&a=1", f"https://h/x?a=1&api_key={S}", f"https://h/?key={S}",
    f"h?password={S}",
    f"Server=h;User Id=me;Password={S};Timeout=5", f"AccountName=a;AccountKey={S};EndpointSuffix=x",
    f"https://a.blob/x?sv=2022&sig={S}%3D&se=1", f"https://s3/x?X-Amz-Signature={HEX}&X-Amz-Credential={S}",
    f"SharedAccessSignature=sv={S}", f"Authorization: Bearer {S}", f"Authorization: Basic {B64}",
    f"authorization: token {S}", f"Proxy-Authorization: Digest {S}",
    f"curl -H 'Authorization: Bearer {S}' h",
    f'"Authorization": "Bearer {S}"', f"> Authorization: AWS4-HMAC x, Signature={S}",
    f"used Bearer {S} there",
    f"got Basic {B64} back", f"Cookie: session={S}; theme=dark", f"Set-Cookie: id={S}; Path=/; HttpOnly",
    f"< set-cookie: id=\"{S}\"; Secure", f"curl -H 'Cookie: id={S}' h", f"X-Auth-Token: {S}",
    f"machine h login me password {S}", f"machine h\n  login me\n  password {S}\n",
    f"machine h password {S}",
    f"//registry.npmjs.org/:_authToken={S}", f"_password={S}", f'{{"auths": {{"h": {{"auth": "{B64}"}}}}}}',
    ("wandb: ERROR login with " + HEX, HEX), (f"WANDB_API_KEY={HEX}", HEX), (f"api_key: {HEX}", HEX),
    ("key is AKIAIOSFODNN7EXAMPLE.", "AKIAIOSFODNN7EXAMPLE"), ("ASIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE"),
    *[(f"it said {one}, then ended", one) for one in (
        f"ghp_{LETTERS}", f"gho_{LETTERS}", f"github_pat_{LETTERS}", f"glpat-{LETTERS}", f"hf_{LETTERS}",
        f"sk-{LETTERS}", f"sk-proj-{LETTERS}", f"sk-ant-api03-{LETTERS}", f"xoxb-12345-{LETTERS}",
        f"xapp-1-{LETTERS}",
        f"AIza{LETTERS}", f"ya29.{LETTERS}", f"npm_{LETTERS}", f"pypi-{LETTERS}", f"dckr_pat_{LETTERS}",
        f"SG.{LETTERS}.{LETTERS}", f"sk_live_{LETTERS}", f"eyJhbGciOiJI.{LETTERS}.{LETTERS}",
        f"hvs.{LETTERS}",
        f"nvapi-{LETTERS}",
    )],
    (f"https://hooks.slack.com/services/T0/B0/{LETTERS}", LETTERS),
    (f"-----BEGIN RSA PRIVATE KEY-----\n{LETTERS}\n{LETTERS}\n-----END RSA PRIVATE KEY-----", LETTERS),
    (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{LETTERS}\n", LETTERS),
    (f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{LETTERS}\n-----END PGP PRIVATE KEY BLOCK-----", LETTERS),
    (f"\"-----BEGIN PRIVATE KEY-----\\n{LETTERS}\\n-----END PRIVATE KEY-----\\n\"", LETTERS),
    (f"{LETTERS}\n{LETTERS}==\n-----END EC PRIVATE KEY-----\n", LETTERS),
    f"password: |\n  {S}\n  more {S}\nnext: 1", f"  secret: >-\n    {S}\n", f"password: \"first\n  {S}\"\n",
    f"password: correct horse {S}", f"DB_PASSWORD=two words {S}\nHOME=/root", f"+password = {S}",
    f"credentials: [{S}, {S}]", f"passwords = ['a', '{S}']", f"NCCL_PSK={S}", f"SLURM_JWT_KEY={S}",
    f"TOKEN=a b;{S}".replace("a b;", ""), f"PATH=/bin\0DB_PASSWORD={S}\0HOME=/", f"private_key: {S}",
    f"WEBHOOK_SECRET='{S}'", f"GitHub-Token={S}", f"WANDB_API_KEY='01'\"{S}\"abcd",
]  # fmt: skip
PLAIN = [
    "step 5: loss 2.31, 1.2k tokens/s, mfu 41.0%", "token_ids: [1, 2, 3]", "token_ids=[101, 102]",
    "the passwords policy of the site", "max_tokens: 5", "tokens_per_s: 3.5", "num_tokens=1000000",
    "TOKENIZERS_PARALLELISM=true", "pad_token: '<pad>'", "eos_token = '</s>'", "next token: 17", "token: 5",
    "KeyError: 'abc'", "key: value", "sort_key=name", "primary key (id)", "keyboard: us", "monkey=banana",
    "author: me", "author=somebody else", "authors: [a, b]", "tokenizer: /data/tok.json", "tokenizer=llama",
    "compass: north", "bypass=true", "passed: 17", "passes: three of four", "Basic training started today",
    "Token embeddings are tied here", "commit 0123456789abcdef0123456789abcdef01234567", "use_auth: false",
    "http://host:8080/metrics", "ssh://git@github.com/x", "s3://bucket/prefix/run@3", "a@b.c wrote: hello",
    '{"kind": "step", "step": 1, "loss": 2.5, "tokens_per_s": 3.5}', "secretary: Ms. Smith",
    "attempt 2: rank 0 died",
    "tokens: [1, 2, 3]", "{'tokens': 512, 'key_value_heads': 8}", "kv_heads: 8", "attention.key.weight",
    "signature: f(x)",
    "function signature: (a, b)", "NODE=n01 RANK=3", "keys: 5", "key=5", "the bearer of news", "basic: yes",
    "login node n01", "the machine learning password managers", "cookies are off", "--token-ids 5",
    "--max-tokens 17",
    "--tokenizer llama", "export PATH=/usr/bin", "secrets:\n  other: 1\n", "model: {heads: 4, kv_heads: 2}",
]  # fmt: skip


def test_every_usual_form_of_a_secret_is_masked() -> None:
    assert len(FORMS) > 100
    masker = Masker()
    for form in FORMS:
        text, secret = (form, S) if isinstance(form, str) else form
        for around in ("{}", "2026-01-01 rank 3: {}", "before\n{}\nafter"):
            if around.startswith("2026") and "\n" in text:
                continue
            masked = masker.mask(around.format(text))
            assert secret not in masked, (text, masked)
            assert B64 not in masked, text
            assert MASK in masked
            assert around[:6].strip("{}\n") in masked
    assert masker.mask("before\npassword=x\nafter") == f"before\npassword={MASK}\nafter"


def test_other_text_stays_as_it_is() -> None:
    masker = Masker()
    assert [masker.mask(text) for text in PLAIN] == PLAIN
    assert masker.mask("\n".join(PLAIN)) == "\n".join(PLAIN)


def test_what_was_json_stays_json() -> None:
    record: dict[str, Any] = {
        "password": S,
        "n": [{"api_key": S, "step": 5}],
        "argv": ["a", "--token", S, f"env.X_KEY=two {S}"],
    }
    record |= {
        "text": f"Authorization: Bearer {S}",
        "token": None,
        "tokens": 5,
        "secrets": {"HF_TOKEN": "/p/x"},
    }
    masker = Masker()
    assert S not in masker.mask(json.dumps(record))
    json.loads(masker.mask(json.dumps({"password": S, "api_key": S, "a": 1})))
    found = masker.mask_record(record)
    assert S not in json.dumps(found)
    assert found["argv"] == ["a", "--token", MASK, f"env.X_KEY={MASK}"]
    assert (found["token"], found["tokens"], found["n"][0]["step"]) == (None, 5, 5)


@pytest.mark.parametrize(
    "value", ["a-plain-value", "pa$$ 'w' \"of\" mine", "two\nlines-of-it", "ünïcode-value"]
)
def test_known_values_go_wherever_they_stand(value: str) -> None:
    masker = Masker([value])
    for text in (
        value,
        shlex.quote(value),
        json.dumps(value),
        repr(value),
        f"x{value}y",
        value.replace("'", "''"),
    ):
        masked = masker.mask(text)
        assert value.splitlines()[-1] not in masked, text
        assert MASK in masked


def test_names_of_secrets() -> None:
    secret = [
        "HF_TOKEN",
        "db.password",
        "apiKey",
        "AccountKey",
        "run.secret",
        "NCCL_PSK",
        "id_rsa.key_secret",
    ]
    assert all(map(is_secret_name, secret))
    plain = ["token_ids", "pad_token", "keyboard", "tokens", "rank-0.json", "n01.log", "plan.json", "PATH"]
    assert not any(map(is_secret_name, plain))


def test_long_lines_take_no_time_that_grows_with_their_square() -> None:
    """With a pattern that tries again from every letter, each of these ends at the suite's own limit."""
    masker = Masker()
    for text in ("x" * 100_000, "a=" * 30_000, "password='" * 8_000, "-----BEGIN PRIVATE KEY-----" * 1_000):
        masker.mask(text)
    for text in (
        "curl " * 10_000,
        f"{'A' * 64}\n" * 3_000,
        "\\" * 50_000,
        "machine " * 9_000,
        "wandb " * 9_000,
    ):
        masker.mask(text)
