BEGIN TRANSACTION;
CREATE TABLE closed_rounds (round INTEGER PRIMARY KEY, closed TEXT NOT NULL);
CREATE TABLE enrolled (
        invite_id TEXT NOT NULL REFERENCES invites,
        node_id TEXT NOT NULL,
        node_name TEXT NOT NULL,
        public_key BLOB NOT NULL,
        certificate_serial TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (invite_id, node_id)
    );
INSERT INTO "enrolled" VALUES('inv','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','node-a',X'6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B','abc');
CREATE TABLE invites (
        invite_id TEXT PRIMARY KEY,
        secret_hash BLOB NOT NULL,
        max_uses INTEGER NOT NULL,
        expires_utc_seconds REAL NOT NULL,
        is_revoked INTEGER NOT NULL DEFAULT 0,
        host TEXT NOT NULL
    );
INSERT INTO "invites" VALUES('inv',X'7373737373737373737373737373737373737373737373737373737373737373',2,1000.0,0,'h');
CREATE TABLE ledger (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        ledger TEXT NOT NULL
    );
INSERT INTO "ledger" VALUES(1,'[{"committed":[],"leased":[{"first":0,"end":10},{"first":10,"end":20}],"ahead":[],"frontier":20}]');
CREATE TABLE members (node_id TEXT PRIMARY KEY, member TEXT NOT NULL);
INSERT INTO "members" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','[{"node_id":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","node_name":"node-a","address":{"public_key":"fefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefe","multiaddrs":["/ip4/192.0.2.1/tcp/1"]},"device":"cpu","num_ranks":1,"version":"0","corpus":{"digest":"0808080808080808080808080808080808080808080808080808080808080808","num_samples":100,"num_bytes":1000},"state":"ready","session_id":1,"lease_until":16.0,"outer_round":0,"outer_digest":"0000000000000000000000000000000000000000000000000000000000000000","outer_incarnation":0,"process_id":0,"committed_tokens":0,"inner_steps_per_second":3.3333333333333335,"is_draining":false,"unreachable":[],"rates":{"up":1000000.0,"down":null},"wire_told":{}}]');
INSERT INTO "members" VALUES('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','[{"node_id":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb","node_name":"node-b","address":{"public_key":"fefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefe","multiaddrs":["/ip4/192.0.2.1/tcp/1"]},"device":"cpu","num_ranks":1,"version":"0","corpus":{"digest":"0808080808080808080808080808080808080808080808080808080808080808","num_samples":100,"num_bytes":1000},"state":"ready","session_id":2,"lease_until":16.0,"outer_round":0,"outer_digest":"0000000000000000000000000000000000000000000000000000000000000000","outer_incarnation":0,"process_id":0,"committed_tokens":0,"inner_steps_per_second":3.3333333333333335,"is_draining":false,"unreachable":[],"rates":{"up":null,"down":null},"wire_told":{}}]');
CREATE TABLE open_round (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        round TEXT NOT NULL
    );
INSERT INTO "open_round" VALUES(1,'[{"number":1,"fragment":0,"base_digest":"0000000000000000000000000000000000000000000000000000000000000000","phase":"exchanging","opened_at":1.0,"train_deadline":61.0,"contribute_deadline":71.0,"commit_deadline":81.0,"assignments":[{"node_id":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","inner_steps":5,"first_sample":0,"num_samples":10},{"node_id":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb","inner_steps":5,"first_sample":10,"num_samples":10}],"slices":[],"token_clock":0,"tokens_per_inner_step":32,"reason":"2 nodes are ready","ahead":[],"trained":{},"held":{},"commit":null,"committed_at":0.0,"apply_deadline":0.0,"applied":{},"apply_seconds":10.0,"later_session_id":3,"trained_at":{},"reduced_at":1.0,"gone_at":null}]');
CREATE TABLE round_parts (
        kind TEXT NOT NULL,
        slice_index INTEGER NOT NULL,
        node_id TEXT NOT NULL,
        part TEXT NOT NULL,
        PRIMARY KEY (kind, slice_index, node_id)
    ) WITHOUT ROWID;
INSERT INTO "round_parts" VALUES('held',0,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','0:1414141414141414141414141414141414141414141414141414141414141414');
INSERT INTO "round_parts" VALUES('held',0,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','1:1515151515151515151515151515151515151515151515151515151515151515');
INSERT INTO "round_parts" VALUES('slice',0,'','[{"slice":{"index":0,"start":0,"num_elements":512,"reducer_id":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},"digest":"1414141414141414141414141414141414141414141414141414141414141414","is_empty":false,"contributors":[{"node_id":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","tokens":80},{"node_id":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb","tokens":80}],"attempt":0,"contribute_deadline":null,"is_orphaned":false,"is_offered":false}]');
INSERT INTO "round_parts" VALUES('slice',1,'','[{"slice":{"index":1,"start":512,"num_elements":512,"reducer_id":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"},"digest":"1515151515151515151515151515151515151515151515151515151515151515","is_empty":false,"contributors":[{"node_id":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","tokens":80},{"node_id":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb","tokens":80}],"attempt":0,"contribute_deadline":null,"is_orphaned":false,"is_offered":false}]');
INSERT INTO "round_parts" VALUES('trained',0,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','[{"inner_steps":5,"tokens":80,"loss":2.5,"seconds":1.5}]');
INSERT INTO "round_parts" VALUES('trained',0,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','[{"inner_steps":5,"tokens":80,"loss":2.5,"seconds":1.5}]');
INSERT INTO "round_parts" VALUES('trained_at',0,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','1.0');
INSERT INTO "round_parts" VALUES('trained_at',0,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','1.0');
CREATE TABLE swarm (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        saved_now REAL NOT NULL,
        state TEXT NOT NULL
    );
INSERT INTO "swarm" VALUES(1,1.0,'[{"rules":{"total_rounds":100,"min_nodes":2,"inner_steps":5,"batch":2,"context":8,"train_seconds":60.0,"contribute_seconds":70.0,"commit_seconds":80.0,"apply_seconds":10.0,"lease_seconds":15.0,"evaluate_every_rounds":1,"adapts_deadlines":false,"floor_seconds":0.0,"has_overlap":false,"slice_elements":4611686018427387904},"run_digest":"9999999999999999999999999999999999999999999999999999999999999999","members":{},"layout":{"digest":"0707070707070707070707070707070707070707070707070707070707070707","fragment_elements":[1024]},"corpus":{"digest":"0808080808080808080808080808080808080808080808080808080808080808","num_samples":100,"num_bytes":1000},"codecs":[],"committed_round":0,"outer_digest":"0000000000000000000000000000000000000000000000000000000000000000","token_clock":0,"ledger":{"committed":[],"leased":[],"ahead":[],"frontier":0},"phase_times":{"train":[],"exchange":[],"commit":[],"apply":[]},"next_session_id":3,"open_round":null,"recent":[],"held_out":[{"round":0,"loss":5.5,"tokens":64}],"evaluating":null,"end_waits_until":null,"is_finished":false,"incarnation":0,"unsupplied_since":null,"wire":{},"round_wire":{},"all_reduce_bytes":0}]');
CREATE INDEX enrolled_by_node ON enrolled (node_id);
COMMIT;
PRAGMA user_version = 4;
