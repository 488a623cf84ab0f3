"""Who goes first when there is not enough for all: the order of those who wait, who is shed, and
whose idle instances make room."""
