"""The router's two HTTP faces: the OpenAI-style data port and the admin port."""
