"""PyPI's openai and anthropic against a server: tools/check_clients runs it with the address and a key."""

import sys
from typing import Literal

import anthropic
import numpy
import openai
import pydantic

ADDRESS, KEY = sys.argv[1:]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is a vector?"}], "max_tokens": 24, "temperature": 0}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
BLOCK = {"name": "look", "description": "Looks.", "input_schema": FUNCTION["parameters"]}


class Order(pydantic.BaseModel):
    """What a reply is held to."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["buy", "sell"]
    count: int = pydantic.Field(ge=0, le=9)


LONG = {**CHAT, "max_tokens": 200}


def raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def with_openai():
    client = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY)
    assert [model.id for model in client.models.list()][0] == "demo"
    whole = client.chat.completions.create(**CHAT)
    choice = whole.choices[0]
    assert choice.message.content and choice.finish_reason in ("stop", "length") and whole.usage.completion_tokens > 0
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content, (text, choice.message.content)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(**CHAT) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == choice.message.content
    again = client.chat.completions.create(**CHAT)
    assert again.choices[0].message.content == choice.message.content
    tools = client.chat.completions.create(**CHAT, tools=[{"type": "function", "function": FUNCTION}])
    assert tools.choices[0].message.content is not None or tools.choices[0].message.tool_calls
    scored = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    logprobs = scored.choices[0].logprobs.content
    assert len(logprobs[0].top_logprobs) == 3 and logprobs[0].logprob <= 0
    # Greedy: the token is the likeliest.
    assert logprobs[0].top_logprobs[0].token == logprobs[0].token
    many = client.chat.completions.create(**{**CHAT, "temperature": 2}, top_p=1, n=3, seed=5)
    assert len({choice.message.content for choice in many.choices}) > 1
    text = client.completions.create(model="demo", prompt="A vector is", max_tokens=8, temperature=0)
    assert text.choices[0].text and text.usage.completion_tokens == 8
    response = client.responses.create(model="demo", input="What is a vector?", max_output_tokens=24, temperature=0)
    assert response.output_text == choice.message.content, response
    with client.responses.stream(model="demo", input="What is a vector?", max_output_tokens=24, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == choice.message.content, text
    parsed = client.chat.completions.parse(**LONG, response_format=Order)
    assert isinstance(parsed.choices[0].message.parsed, Order), parsed
    parsed = client.responses.parse(model="demo", input="What is a vector?", max_output_tokens=200, text_format=Order)
    assert isinstance(parsed.output_parsed, Order), parsed
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"not": {}}}}}}
    error = raised(openai.BadRequestError, lambda: client.chat.completions.create(**CHAT, response_format=wrong))
    assert error.param == "response_format.json_schema.schema.properties.a", error
    long = [{"role": "user", "content": "word " * 4000}]
    error = raised(openai.BadRequestError, lambda: client.chat.completions.create(**{**CHAT, "messages": long}))
    assert error.code == "context_length_exceeded", error
    raised(openai.NotFoundError, lambda: client.chat.completions.create(**{**CHAT, "model": "gpt-9"}))
    # It asks for base64 unless told otherwise.
    texts = ["What is a vector?", "A list of numbers."]
    made = client.embeddings.create(model="embedding", input=texts)
    floats = client.embeddings.create(model="embedding", input=texts, encoding_format="float")
    # JSON has the shortest text of each f32.
    same = [numpy.array_equal(numpy.float32(a.embedding), numpy.float32(b.embedding)) for a, b in zip(made.data, floats.data)]
    assert same == [True, True]
    assert abs(sum(value * value for value in made.data[0].embedding) - 1) < 1e-4 and made.usage.total_tokens > 0
    short = client.embeddings.create(model="embedding", input=texts[0], dimensions=8)
    assert len(short.data[0].embedding) == 8
    error = raised(openai.BadRequestError, lambda: client.embeddings.create(model="demo", input="x"))
    assert "makes no embeddings" in error.message, error
    stranger = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key="wrong")
    raised(openai.AuthenticationError, lambda: stranger.models.list())
    return choice.message.content


def with_anthropic(text):
    # Newer versions have no argument for it.
    chat = {**CHAT, "extra_body": {"temperature": CHAT["temperature"]}}
    del chat["temperature"]
    client = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY)
    whole = client.messages.create(**chat)
    assert whole.content[0].text == text, (whole, text)
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.usage.output_tokens > 0
    with client.messages.stream(**chat) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (text, whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens
    tools = client.messages.create(**chat, system="Be brief.", tools=[BLOCK], stop_sequences=["###"])
    assert tools.content
    count = client.messages.count_tokens(model="demo", messages=chat["messages"])
    usage = whole.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    form = {"output_config": {"format": {"type": "json_schema", "schema": Order.model_json_schema()}}, **chat["extra_body"]}
    held = client.messages.create(**{**chat, "max_tokens": 200, "extra_body": form})
    Order.model_validate_json(held.content[0].text)
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]}]
    raised(anthropic.BadRequestError, lambda: client.messages.create(**{**chat, "messages": image}))
    stranger = anthropic.Anthropic(base_url=ADDRESS, api_key="wrong")
    raised(anthropic.AuthenticationError, lambda: stranger.messages.create(**chat))


text = with_openai()
print("  openai", openai.__version__)
with_anthropic(text)
print("  anthropic", anthropic.__version__)
