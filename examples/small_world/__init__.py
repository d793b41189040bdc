"""A world for one machine: people, facts about them, and a model of half a million parameters that asks."""
