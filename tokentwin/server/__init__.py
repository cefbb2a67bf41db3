"""The OpenAI API over HTTP. `backend.py` is all that it knows of what generates; twin and engine implement it."""
