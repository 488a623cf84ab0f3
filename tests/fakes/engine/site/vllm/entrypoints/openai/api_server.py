"""`python -m vllm.entrypoints.openai.api_server`, as of the real one."""

from tests.fakes.engine.server import main

if __name__ == "__main__":
    main()
