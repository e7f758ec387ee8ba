"""``format("etlstage-journal")``: journals as a data source of Spark."""
