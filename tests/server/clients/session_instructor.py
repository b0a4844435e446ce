"""instructor: an object by a forced call and by a JSON schema, whole and streamed. Arguments: URL, model."""

import sys
from typing import Literal

import instructor
import openai
import pydantic

url, model = sys.argv[1:]


class Sheet(pydantic.BaseModel):
    folds: Literal[1, 2, 3, 4]
    kind: Literal["quarto", "octavo"]


user = [{"role": "user", "content": "An octavo is a sheet folded three times."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="k"), mode=mode)
    made = client.chat.completions.create(model=model, messages=user, response_model=Sheet, temperature=0)
    assert isinstance(made, Sheet), made
    *_, last = client.chat.completions.create_partial(
        model=model, messages=user, response_model=Sheet, temperature=0
    )
    # Streamed, the library names the form PartialSheet: another prompt, which may have another answer.
    Sheet.model_validate(last.model_dump())
print("ok")
