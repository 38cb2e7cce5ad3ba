"""
Replacing whole replicas of a ModelDeployment, one at a time and role by role. Pure.

`sight` reads what stands, `render` says what should stand, and the whole subject is never to mix
the two: every question about a standing replica is answered from what its own members carry.
`pass_` puts the parts together into one `Plan`; `engine.modeldeployment` carries it out.
"""
