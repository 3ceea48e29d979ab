BEGIN TRANSACTION;
CREATE TABLE documents (number INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, collection TEXT NOT NULL, id TEXT NOT NULL, ingestion TEXT NOT NULL, version TEXT NOT NULL, stored_version TEXT NOT NULL DEFAULT '', metadata TEXT NOT NULL, body TEXT, reason TEXT NOT NULL DEFAULT '', num_chunks INTEGER NOT NULL DEFAULT 0, num_tokens INTEGER NOT NULL DEFAULT 0, num_known_kv INTEGER NOT NULL DEFAULT 0, num_new_kv INTEGER NOT NULL DEFAULT 0, new_kv_bytes INTEGER NOT NULL DEFAULT 0, UNIQUE (namespace, collection, id));
INSERT INTO "documents" VALUES(1,'','notes','1','4e03354c5a614042adb74f63adb00e1c','v1','v1','{"author": "A"}',NULL,'',1,7,0,1,4096);
INSERT INTO "documents" VALUES(2,'tenant','notes','1','a6a1d4ec3bf248c58ff2b77de3a20655','v1','','{}','{"chunks": ["Chalk is soft."]}','',0,0,0,0,0);
INSERT INTO "documents" VALUES(3,'','notes','2','f302446d079848d8be8eeee442544c06','v1','','{}','{"text": "x"}','',0,0,0,0,0);
CREATE INDEX documents_waiting ON documents (number) WHERE body IS NOT NULL;
COMMIT;
