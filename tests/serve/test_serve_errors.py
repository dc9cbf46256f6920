"""Requests that are refused, each by a status and words of its error."""

from __future__ import annotations

import http.client
import json
import socket
import time
from contextlib import closing

import pytest

from etc_dist import cli
from etc_dist.errors import ArgumentError
from etc_dist.serve.request_fields import (
    NEUTRAL,
    BadRequest,
    read_chat,
    read_completion,
)
from etc_dist.serve.serve_command import bound_socket

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "a"}
HI = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


def answered(server, path, body, headers=JSON):
    """The status, and the error of the answer."""
    host = server.url.split("/")[2]
    with closing(http.client.HTTPConnection(host, timeout=20)) as connection:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]


@pytest.mark.parametrize(
    ("fields", "status", "words", "param"),
    [
        ({}, 400, "expected a text, an array of ids", "prompt"),
        ({"prompt": []}, 400, "expected a text, an array", "prompt"),
        ({"prompt": ["a", 1]}, 400, "expected a text, an array", "prompt"),
        ({"prompt": ""}, 400, "one token or more", "prompt"),
        ({"prompt": [528]}, 400, "ids of 0 .. 527", "prompt"),
        ({"prompt": "a" * 90}, 400, "90 tokens, and max_tokens = 16", "max_tokens"),
        ({"prompt": "a" * 96}, 400, "at most 95 tokens, got 96", "prompt"),
        (PROMPT | {"max_tokens": 0}, 400, "from 1 to", "max_tokens"),
        (PROMPT | {"max_tokens": True}, 400, "an integer, got true", "max_tokens"),
        (PROMPT | {"model": "other"}, 404, '"other" is not served', "model"),
        (PROMPT | {"temperature": -1}, 400, "temperature of 0", "temperature"),
        (PROMPT | {"top_p": 1.5}, 400, "0 < top_p <= 1", "top_p"),
        (PROMPT | {"n": 129}, 400, "from 1 to 128", "n"),
        (PROMPT | {"stop": ["a", ""]}, 400, "texts of 1 to", "stop"),
        (PROMPT | {"stop_token_ids": [528]}, 400, "ids of 0 .. 527", "stop_token_ids"),
        (PROMPT | {"logprobs": 21}, 400, "from 0 to 20", "logprobs"),
        (PROMPT | {"logit_bias": {"5": 1}}, 400, "not supported", "logit_bias"),
        (PROMPT | {"echo": True}, 400, "except false; got true", "echo"),
        (PROMPT | {"grammar": "x"}, 400, "this field is not known", "grammar"),
        (PROMPT | {"stream_options": {"x": 1}}, 400, "is not known", "x"),
        ({"messages": []}, 400, "an array of one object or more", "messages"),
        ({"messages": [{"content": "Hi"}]}, 400, "role", "messages"),
        ({"messages": HI, "top_logprobs": 1}, 400, "logprobs = true", "top_logprobs"),
        ({"messages": HI, "tool_choice": "required"}, 400, '"auto"', "tool_choice"),
        ({"messages": HI, "tools": [1]}, 400, "one of tools", "messages"),
        ({"messages": HI, "chat_template_kwargs": {"x": 1}}, 400, "'x'", "messages"),
        (
            {"messages": HI, "chat_template_kwargs": {"add_generation_prompt": 5}},
            400,
            "add_generation_prompt expects a bool, got int",
            "messages",
        ),
        (
            {"messages": HI, "chat_template_kwargs": {"self": 1}},
            400,
            "self is no variable",
            "chat_template_kwargs",
        ),
    ],
    ids=str,
)
def test_fields_are_refused_by_name(server, fields, status, words, param):
    path = CHAT if "messages" in fields else COMPLETIONS
    answer_status, error = answered(server, path, json.dumps(fields))
    assert (answer_status, error["code"], error["param"]) == (status, status, param)
    assert words in error["message"], error


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"),
    [
        (COMPLETIONS, "{", JSON, 400, "the body is no JSON: Expecting"),
        (COMPLETIONS, "[1]", JSON, 400, "no JSON object"),
        (COMPLETIONS, '{"top_p": NaN}', JSON, 400, "NaN is not a number of JSON"),
        (COMPLETIONS, b"\xff", JSON, 400, "the body is no JSON"),
        (COMPLETIONS, '{"a":' + "[" * 10**5, JSON, 400, "the body is no JSON"),
        (COMPLETIONS, b" " * (2 << 20), JSON, 413, "more than 1048576 bytes"),
        (COMPLETIONS, "{}", {"content-type": "text/plain"}, 415, "application/json"),
        ("/v1/models", "{}", JSON, 405, "POST /v1/models: Method Not Allowed"),
        ("/v1/embeddings", "{}", JSON, 404, "POST /v1/embeddings: Not Found"),
    ],
)
def test_bodies_are_refused(server, path, body, headers, status, words):
    answer_status, error = answered(server, path, body, headers)
    assert answer_status == status and words in error["message"]


def test_models_are_found_by_their_names(server, openai):
    assert [model.id for model in server.client.models.list()] == [server.name]
    assert server.client.models.retrieve(server.name).max_model_len == 96
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        server.client.models.retrieve("other/one")


def test_a_long_name_of_a_field_is_not_sent_back():
    with pytest.raises(BadRequest) as caught:
        read_completion(PROMPT | {"x" * 10**5: 1}, "m")
    assert len(caught.value.message) + len(caught.value.param or "") < 200


def test_each_neutral_value_is_taken_and_each_other_is_refused():
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            read_completion(PROMPT | {name: value}, "m")
            read_chat({"messages": HI, name: value}, "m")
        with pytest.raises(BadRequest, match=f"{name}: not supported") as caught:
            read_chat({"messages": HI, name: "other"}, "m")
        assert caught.value.param == name


def test_a_client_that_leaves_in_its_body_is_no_error(server):
    host, port = server.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"
            b"content-type: application/json\r\n\r\n{"
        )
    time.sleep(0.2)
    assert server.client.models.list().data[0].id == server.name  # its log is empty


def test_an_address_in_use_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setenv("ETC_DIST_BACKEND", "cpu")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert cli.main(["serve", str(folder), "--port", port]) == 1
    error = capsys.readouterr().err
    assert f"--port {port}" in error and "choose another --port" in error


@pytest.mark.parametrize("host", ["fe80::1%nosuch", "203.0.113.1", "a..b"])
def test_a_host_that_is_not_of_this_machine_is_named(host):
    with pytest.raises(ArgumentError, match="to do: .* another --host") as caught:
        bound_socket(host, 0)
    assert f"--host {host}" in caught.value.where


def test_a_missing_package_is_named(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "etc_dist.serve.serve_command.PACKAGES", ("starlette", "uvicorm")
    )
    assert cli.main(["serve", str(folder)]) == 1
    assert "uvicorm of the extra `serve` is not installed" in capsys.readouterr().err
