"""
The modelpool router: several models take turns on one accelerator slot.

Start reading at ``core/scheduler.py`` (whom to serve, when to swap), then ``runtime/pool.py``
(the shell that carries decisions out) and ``web/`` (the OpenAI-style endpoint).
"""
