"""
The Kubernetes API of modelpool: names, types and the CRDs made from them. No I/O.

Both programs read it. Needs pydantic and the standard library, so that a tool can use the types
without a Kubernetes client.
"""
