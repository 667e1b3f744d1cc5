"""OpenAI's own client: python openai_client.py [http://HOST:PORT/v1]"""

import sys

import openai


def main(base_url: str) -> int:
    client = openai.OpenAI(base_url=base_url, api_key="unused")  # a tenant's key, where there are any
    [model] = client.models.list()
    stream = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "What color is the sky on a clear day?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"lane": "interactive", "ttft_target_ms": 2000},  # what OpenAI does not have
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.completion_tokens} tokens")
    try:
        client.completions.create(model=model.id, prompt="x", temperature=-1)
    except openai.BadRequestError as error:
        print(f"refused: {error.param}: {error.message}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["http://127.0.0.1:8000/v1"]))
