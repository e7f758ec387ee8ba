"""``format("etlstage")``: workers as a data source of Spark."""
