"""How members are brought up and taken down. `base` is the contract; one module per platform."""
