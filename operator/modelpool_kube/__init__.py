"""
The one door to the API server, and the fence in front of every slot. Used by both programs.

Nothing else imports a Kubernetes client. `port` is what reconcilers and drivers are written
against; `client` is the real one. What may be decided without asking anybody (`record`,
`slotrules`) is pure.
"""
